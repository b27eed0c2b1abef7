//! OpenAPI schemas of the types with hand-written serde implementations.

use std::borrow::Cow;

use serde_json::json;
use utoipa::openapi::schema::{AdditionalProperties, KnownFormat, Object, ObjectBuilder, SchemaFormat, Type};
use utoipa::openapi::{OneOfBuilder, RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use crate::amounts::{AMOUNTS_MAX, Amounts};
use crate::expect::Expect;
use crate::seconds::{SECONDS_MAX, Seconds};
use crate::text::{EntityId, LeaseRef, LimitText, RequestId, ResourceName, Time, TokenId, TokenScopes};

/// The pattern of entity and resource names.
const NAME: &str = r"^(?!_default_$)[^#$\x00-\x1f\x7f-\x9f][^#\x00-\x1f\x7f-\x9f]*$";

macro_rules! schema {
    ($Type:ty, $name:literal, $schema:expr) => {
        impl PartialSchema for $Type {
            fn schema() -> RefOr<Schema> {
                RefOr::T(Schema::from($schema))
            }
        }

        impl ToSchema for $Type {
            fn name() -> Cow<'static, str> {
                Cow::Borrowed($name)
            }
        }
    };
}

fn text(description: &str, example: &str) -> ObjectBuilder {
    let text = ObjectBuilder::new().schema_type(Type::String);
    text.description(Some(description)).examples([json!(example)])
}

schema!(
    EntityId,
    "EntityId",
    text("The name of an entity.", "acme")
        .min_length(Some(1))
        .max_length(Some(256))
        .pattern(Some(NAME))
        .build()
);
schema!(
    ResourceName,
    "ResourceName",
    text("The name of a resource.", "gpt-4")
        .min_length(Some(1))
        .max_length(Some(256))
        .pattern(Some(NAME))
        .build()
);
schema!(
    LimitText,
    "Limit",
    text(
        "name:amount/period[:burst][,across=resources|entities|both][,debt=units]. Without `across` it counts each \
         entity on each resource separately.",
        "tpm:100k/min:150k"
    )
    .pattern(Some(concat!(
        r"^[A-Za-z0-9_.-]{1,64}:[0-9.]+[kMG]?/[0-9a-zµμ]+(:[0-9.]+[kMG]?)?",
        r"(,(across=(resources|entities|both)|debt=[0-9.]+[kMG]?)){0,2}$"
    )))
        .build()
);
schema!(
    Time,
    "Time",
    text("A timestamp, RFC 3339.", "2026-01-31T09:30:00Z")
        .format(Some(SchemaFormat::KnownFormat(KnownFormat::DateTime)))
        .build()
);
schema!(
    LeaseRef,
    "LeaseRef",
    text("The name of a lease. It is a credential: treat it as a secret.", &"0".repeat(64))
        .pattern(Some("^[0-9a-fA-F]{64}$"))
        .build()
);
schema!(
    RequestId,
    "RequestId",
    text("An idempotency key, chosen at random.", "01890a5d-ac96-774b-bcce-b302099a8057")
        .pattern(Some("^[A-Za-z0-9_.-]{16,64}$"))
        .build()
);
schema!(TokenId, "TokenId", text("The id of a token.", "ci").pattern(Some("^[A-Za-z0-9_.-]{1,64}$")).build());
schema!(
    TokenScopes,
    "TokenScopes",
    text("The scopes of a token.", "acquire,read")
        .pattern(Some("^(acquire|read|admin)(,(acquire|read|admin)){0,2}$"))
        .build()
);
schema!(
    Seconds,
    "Seconds",
    ObjectBuilder::new()
        .schema_type(Type::Number)
        .description(Some("A duration in seconds, exact to the microsecond."))
        .minimum(Some(0))
        .maximum(Some(SECONDS_MAX))
        .examples([json!(2.5)])
        .build()
);
schema!(Amounts<u64>, "Cost", amounts("Units by limit name.", 0));
schema!(Amounts<i64>, "Changes", amounts("Signed changes in units by limit name.", -(1 << 40)));
schema!(
    Expect,
    "Expect",
    OneOfBuilder::new()
        .description(Some("The expected current state."))
        .item(ObjectBuilder::new().schema_type(Type::String).enum_values(Some(["any", "absent"])))
        .item(ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(0)))
        .build()
);

fn amounts(description: &str, min: i64) -> Object {
    let units = ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(min)).maximum(Some(1_i64 << 40));
    let name = ObjectBuilder::new().schema_type(Type::String).pattern(Some("^[A-Za-z0-9_.-]{1,64}$"));
    ObjectBuilder::new()
        .description(Some(description))
        .additional_properties(Some(AdditionalProperties::RefOr(RefOr::T(units.into()))))
        .property_names(Some(name))
        .max_properties(Some(AMOUNTS_MAX))
        .examples([json!({"rpm": 1})])
        .build()
}
