//! The document of the API: what each route says of itself, and what the table says of all of them.

use std::sync::LazyLock;

use tidegate_client::Problem;
use utoipa::PartialSchema;
use utoipa::ToSchema;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{
    ComponentsBuilder, Content, InfoBuilder, OpenApi, Ref, RefOr, Response, ResponseBuilder,
};

use crate::routes::{Access, described, routes};

/// What everybody may be told whatever they ask.
const ALWAYS: [(&str, &str); 4] = [
    ("401", "No token, or none that is good."),
    ("403", "The token lacks the scope, is for another namespace, or the lease is another's."),
    ("422", "A field is wrong, or its value is out of its bounds."),
    ("503", "As many requests are under way as may, the store is away, or the server is stopping."),
];

/// The same for those who send a body.
const WITH_BODY: [(&str, &str); 4] = [
    ("400", "The body is no JSON, or broken off."),
    ("408", "The body took too long to arrive."),
    ("413", "The body is too large."),
    ("415", "The body's content-type is not application/json."),
];

/// The API as OpenAPI 3.1.
pub fn document() -> &'static OpenApi {
    static DOCUMENT: LazyLock<OpenApi> = LazyLock::new(make);
    &DOCUMENT
}

fn make() -> OpenApi {
    let mut document = described();
    document.info = InfoBuilder::new()
        .title("tidegate")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some("Shared limits: nobody gets more than agreed, whichever process asks."))
        .build();
    let components = document.components.get_or_insert_with(|| ComponentsBuilder::new().build());
    let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).bearer_format("tg_ID_SECRET").build();
    components.add_security_scheme("token", SecurityScheme::Http(bearer));
    components.schemas.insert(Problem::name().into_owned(), Problem::schema());
    for route in routes() {
        let Some(item) = document.paths.paths.get_mut(route.path) else { continue };
        let Some(operation) = operation(item, route.method.as_str()) else { continue };
        operation.operation_id = Some(name(route.method.as_str(), route.path));
        if let Access::Scope(scope) = route.access {
            operation.security = Some(vec![SecurityRequirement::new("token", [scope.as_str()])]);
            let body = WITH_BODY.iter().filter(|_| operation.request_body.is_some());
            for (status, description) in ALWAYS.iter().chain(body) {
                let problem = Content::new(Some(Ref::from_schema_name("Problem")));
                let response =
                    ResponseBuilder::new().description(*description).content(Problem::CONTENT_TYPE, problem);
                let responses = &mut operation.responses.responses;
                responses.entry((*status).to_owned()).or_insert(RefOr::T(response.build()));
            }
        }
        for response in operation.responses.responses.values_mut() {
            if let RefOr::T(response) = response {
                as_problem(response);
            }
        }
    }
    document
}

/// What an operation is called: `post_acquire_batch`, `get_entities_entity`.
fn name(method: &str, path: &str) -> String {
    let parts = path.split(['/', '.']).filter(|part| !part.is_empty() && *part != "v1");
    let parts = parts.map(|part| part.trim_matches(['{', '}']));
    [method.to_lowercase().as_str()].into_iter().chain(parts).collect::<Vec<_>>().join("_")
}

/// A problem has a content type of its own.
fn as_problem(response: &mut Response) {
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
