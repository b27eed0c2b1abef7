//! Builds the OpenAPI document from the route descriptions and the route table.

use std::sync::LazyLock;

use tidegate_client::Problem;
use utoipa::PartialSchema;
use utoipa::ToSchema;
use utoipa::openapi::extensions::Extensions;
use utoipa::openapi::link::LinkBuilder;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::schema::{KnownFormat, SchemaFormat, Type};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{
    ComponentsBuilder, Content, InfoBuilder, ObjectBuilder, OpenApi, Ref, RefOr, Required, Response,
    ResponseBuilder, Schema,
};

use crate::routes::{Access, described, routes};

/// Error responses of every authenticated route.
const ALWAYS: [(&str, &str); 6] = [
    ("401", "No token, or an invalid one."),
    (
        "403",
        "The token lacks the scope, is for another namespace or entity, or does not own the lease; or the entity is disabled.",
    ),
    ("422", "A field is invalid or out of bounds."),
    ("500", "Internal error; see the server's log."),
    ("507", "The store is full."),
    ("503", "Too many requests are in flight, the store is unavailable, or the server is stopping."),
];

/// Error responses of routes with a body.
const WITH_BODY: [(&str, &str); 4] = [
    ("400", "The body is truncated or not valid JSON."),
    ("408", "The body took too long to arrive."),
    ("413", "The body is too large."),
    ("415", "The body's content-type is not application/json, or it has a content-encoding."),
];

/// Error responses of lease routes.
const OF_LEASES: [(&str, &str); 2] =
    [("404", "The lease ended long ago."), ("409", "A later step of the lease was already completed.")];

/// The requests with a step number. Step 0 is the draw, and the last number is reserved for the store.
const STEPS: [&str; 5] = ["Extend", "Adjust", "Renew", "Settle", "Cancel"];

/// Returns the OpenAPI 3.1 document.
pub fn document() -> &'static OpenApi {
    static DOCUMENT: LazyLock<OpenApi> = LazyLock::new(make);
    &DOCUMENT
}

fn make() -> OpenApi {
    let mut document = described();
    document.info = InfoBuilder::new()
        .title("tidegate")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some("Shared rate limits, quotas and leases for any number of processes."))
        .build();
    let components = document.components.get_or_insert_with(|| ComponentsBuilder::new().build());
    let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).bearer_format("tg_ID_SECRET").build();
    components.add_security_scheme("token", SecurityScheme::Http(bearer));
    components.schemas.insert(Problem::name().into_owned(), Problem::schema());
    for (name, schema) in &mut components.schemas {
        fix_numbers(name, schema);
    }
    for route in routes() {
        let Some(item) = document.paths.paths.get_mut(route.path) else { continue };
        let Some(operation) = operation(item, route.method.as_str()) else { continue };
        operation.operation_id = Some(name(route.method.as_str(), route.path));
        if let Access::Scope(scope) = route.access {
            operation.security = Some(vec![SecurityRequirement::new("token", [scope.as_str()])]);
            let body = WITH_BODY.iter().filter(|_| operation.request_body.is_some());
            let lease = OF_LEASES.iter().filter(|_| route.path.starts_with("/v1/leases/"));
            for (status, description) in ALWAYS.iter().chain(body).chain(lease) {
                let problem = Content::new(Some(Ref::from_schema_name("Problem")));
                let response =
                    ResponseBuilder::new().description(*description).content(Problem::CONTENT_TYPE, problem);
                let responses = &mut operation.responses.responses;
                responses.entry((*status).to_owned()).or_insert(RefOr::T(response.build()));
            }
        }
        add_constraints(operation, route.path);
        for response in operation.responses.responses.values_mut() {
            if let RefOr::T(response) = response {
                set_problem_content_type(response);
            }
        }
    }
    document
}

/// Removes the `int32` format of unsigned numbers, which excludes half of their range, and bounds step
/// numbers.
fn fix_numbers(name: &str, schema: &mut RefOr<Schema>) {
    let RefOr::T(Schema::Object(object)) = schema else { return };
    for (field, schema) in &mut object.properties {
        let RefOr::T(Schema::Object(number)) = schema else { continue };
        if number.format == Some(SchemaFormat::KnownFormat(KnownFormat::Int32)) {
            number.format = None;
        }
        if field == "step" && STEPS.contains(&name) {
            (number.minimum, number.maximum) = (Some(1.into()), Some((u32::MAX - 1).into()));
        }
    }
}

/// Adds what the types do not express: page bounds, required parameters and links.
fn add_constraints(operation: &mut Operation, path: &str) {
    for parameter in operation.parameters.iter_mut().flatten() {
        match parameter.name.as_str() {
            "max" => {
                let page =
                    ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(1)).maximum(Some(1_000));
                parameter.schema = Some(RefOr::T(page.build().into()));
            }
            "entity" if path == "/v1/balances" => parameter.required = Required::True,
            "resource" if path == "/v1/capacity" => parameter.required = Required::True,
            _ => {}
        }
    }
    let links: &[(&str, &str, &str)] = match path {
        "/v1/acquire" => &[
            ("get_leases_lease", "lease", "$response.body#/lease"),
            ("post_leases_lease_extend", "lease", "$response.body#/lease"),
            ("post_leases_lease_adjust", "lease", "$response.body#/lease"),
            ("post_leases_lease_renew", "lease", "$response.body#/lease"),
            ("post_leases_lease_settle", "lease", "$response.body#/lease"),
            ("post_leases_lease_cancel", "lease", "$response.body#/lease"),
        ],
        "/v1/tokens" => &[("delete_tokens_token", "token", "$response.body#/token/id")],
        _ => &[],
    };
    // Only a newly created resource has links.
    if let Some(RefOr::T(made)) = operation.responses.responses.get_mut("200")
        && operation.request_body.is_some()
    {
        for (to, name, from) in links {
            // The builder would serialize this field under another name than OpenAPI's.
            let mut to_id = Extensions::default();
            to_id.insert("operationId".to_owned(), (*to).into());
            let link = LinkBuilder::new().parameter(*name, *from).extensions(Some(to_id)).build();
            made.links.insert((*to).to_owned(), RefOr::T(link));
        }
    }
}

/// Returns the operation id: `post_acquire_batch`, `get_entities_entity`.
fn name(method: &str, path: &str) -> String {
    let parts = path.split(['/', '.']).filter(|part| !part.is_empty() && *part != "v1");
    let parts = parts.map(|part| part.trim_matches(['{', '}']));
    [method.to_lowercase().as_str()].into_iter().chain(parts).collect::<Vec<_>>().join("_")
}

/// Sets the content type of problem responses.
fn set_problem_content_type(response: &mut Response) {
    let content = &mut response.content;
    let is_problem = |content: &Content| matches!(&content.schema, Some(RefOr::Ref(to)) if to.ref_location.ends_with("/Problem"));
    if content.get("application/json").is_some_and(is_problem)
        && let Some(problem) = content.swap_remove("application/json")
    {
        content.insert(Problem::CONTENT_TYPE.to_owned(), problem);
    }
}

fn operation<'a>(item: &'a mut PathItem, method: &str) -> Option<&'a mut Operation> {
    match method {
        "GET" => item.get.as_mut(),
        "PUT" => item.put.as_mut(),
        "POST" => item.post.as_mut(),
        "DELETE" => item.delete.as_mut(),
        _ => None,
    }
}
