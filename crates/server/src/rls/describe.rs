//! Descriptors of the service's messages, for gRPC reflection.
//!
//! The crate with the message types does not include their descriptors, and compiling them requires Envoy's
//! whole API. `ShouldRateLimit` needs only a small part; a test decodes real messages with it.

use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{
    DescriptorProto, EnumDescriptorProto, EnumValueDescriptorProto, FieldDescriptorProto,
    FileDescriptorProto, FileDescriptorSet, MethodDescriptorProto, ServiceDescriptorProto,
};
use tonic_reflection::server::{Builder, v1, v1alpha};

use Type::{Bool, Bytes, Enum, Int32, Int64, Message, String as Text, Uint32, Uint64};

const DESCRIPTOR: &str = ".envoy.extensions.common.ratelimit.v3.RateLimitDescriptor";
const RESPONSE: &str = ".envoy.service.ratelimit.v3.RateLimitResponse";
const UNITS: [(&str, i32); 8] = [
    ("UNKNOWN", 0),
    ("SECOND", 1),
    ("MINUTE", 2),
    ("HOUR", 3),
    ("DAY", 4),
    ("MONTH", 5),
    ("YEAR", 6),
    ("WEEK", 7),
];

/// Creates the reflection service, in both versions in use.
pub(super) fn reflection() -> (
    v1::ServerReflectionServer<impl v1::ServerReflection>,
    v1alpha::ServerReflectionServer<impl v1alpha::ServerReflection>,
) {
    let builder = || {
        Builder::configure()
            .register_file_descriptor_set(FileDescriptorSet { file: files() })
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let v1 = builder().build_v1().expect("the descriptors are well-formed");
    let v1alpha = builder().build_v1alpha().expect("the descriptors are well-formed");
    (v1, v1alpha)
}

/// All files, in dependency order.
pub(super) fn files() -> Vec<FileDescriptorProto> {
    vec![
        file(
            "google/protobuf/duration.proto",
            "google.protobuf",
            &[],
            vec![message("Duration", &[("seconds", 1, Int64, ""), ("nanos", 2, Int32, "")])],
        ),
        file(
            "google/protobuf/wrappers.proto",
            "google.protobuf",
            &[],
            vec![message("UInt64Value", &[("value", 1, Uint64, "")])],
        ),
        FileDescriptorProto {
            enum_type: vec![numbers("RateLimitUnit", &UNITS)],
            ..file("envoy/type/v3/ratelimit_unit.proto", "envoy.type.v3", &[], vec![])
        },
        file(
            "envoy/config/core/v3/base.proto",
            "envoy.config.core.v3",
            &[],
            vec![message(
                "HeaderValue",
                &[("key", 1, Text, ""), ("value", 2, Text, ""), ("raw_value", 3, Bytes, "")],
            )],
        ),
        file(
            "envoy/extensions/common/ratelimit/v3/ratelimit.proto",
            "envoy.extensions.common.ratelimit.v3",
            &["envoy/type/v3/ratelimit_unit.proto", "google/protobuf/wrappers.proto"],
            vec![descriptor()],
        ),
        service(),
    ]
}

fn descriptor() -> DescriptorProto {
    let entry = message("Entry", &[("key", 1, Text, ""), ("value", 2, Text, "")]);
    let limit = message(
        "RateLimitOverride",
        &[("requests_per_unit", 1, Uint32, ""), ("unit", 2, Enum, ".envoy.type.v3.RateLimitUnit")],
    );
    let descriptor = message(
        "RateLimitDescriptor",
        &[
            ("entries[]", 1, Message, &inner(DESCRIPTOR, "Entry")),
            ("limit", 2, Message, &inner(DESCRIPTOR, "RateLimitOverride")),
            ("hits_addend", 3, Message, ".google.protobuf.UInt64Value"),
            ("is_negative_hits", 4, Bool, ""),
        ],
    );
    DescriptorProto { nested_type: vec![entry, limit], ..descriptor }
}

fn service() -> FileDescriptorProto {
    let method = MethodDescriptorProto {
        name: Some("ShouldRateLimit".to_owned()),
        input_type: Some(".envoy.service.ratelimit.v3.RateLimitRequest".to_owned()),
        output_type: Some(RESPONSE.to_owned()),
        ..MethodDescriptorProto::default()
    };
    let service = ServiceDescriptorProto {
        name: Some("RateLimitService".to_owned()),
        method: vec![method],
        ..ServiceDescriptorProto::default()
    };
    let request = message(
        "RateLimitRequest",
        &[("domain", 1, Text, ""), ("descriptors[]", 2, Message, DESCRIPTOR), ("hits_addend", 3, Uint32, "")],
    );
    let needs = [
        "envoy/config/core/v3/base.proto",
        "envoy/extensions/common/ratelimit/v3/ratelimit.proto",
        "google/protobuf/duration.proto",
    ];
    FileDescriptorProto {
        service: vec![service],
        ..file(
            "envoy/service/ratelimit/v3/rls.proto",
            "envoy.service.ratelimit.v3",
            &needs,
            vec![request, response()],
        )
    }
}

/// The response fields that this server sets.
fn response() -> DescriptorProto {
    let limit = message(
        "RateLimit",
        &[
            ("requests_per_unit", 1, Uint32, ""),
            ("unit", 2, Enum, &inner(RESPONSE, "RateLimit.Unit")),
            ("name", 3, Text, ""),
        ],
    );
    let limit = DescriptorProto { enum_type: vec![numbers("Unit", &UNITS)], ..limit };
    let status = message(
        "DescriptorStatus",
        &[
            ("code", 1, Enum, &inner(RESPONSE, "Code")),
            ("current_limit", 2, Message, &inner(RESPONSE, "RateLimit")),
            ("limit_remaining", 3, Uint32, ""),
            ("duration_until_reset", 4, Message, ".google.protobuf.Duration"),
        ],
    );
    let response = message(
        "RateLimitResponse",
        &[
            ("overall_code", 1, Enum, &inner(RESPONSE, "Code")),
            ("statuses[]", 2, Message, &inner(RESPONSE, "DescriptorStatus")),
            ("response_headers_to_add[]", 3, Message, ".envoy.config.core.v3.HeaderValue"),
            ("request_headers_to_add[]", 4, Message, ".envoy.config.core.v3.HeaderValue"),
            ("raw_body", 5, Bytes, ""),
        ],
    );
    DescriptorProto {
        nested_type: vec![limit, status],
        enum_type: vec![numbers("Code", &[("UNKNOWN", 0), ("OK", 1), ("OVER_LIMIT", 2)])],
        ..response
    }
}

fn inner(outer: &str, name: &str) -> String {
    format!("{outer}.{name}")
}

fn file(name: &str, package: &str, needs: &[&str], messages: Vec<DescriptorProto>) -> FileDescriptorProto {
    FileDescriptorProto {
        name: Some(name.to_owned()),
        package: Some(package.to_owned()),
        dependency: needs.iter().map(|name| (*name).to_owned()).collect(),
        message_type: messages,
        syntax: Some("proto3".to_owned()),
        ..FileDescriptorProto::default()
    }
}

/// A message. A field name that ends in `[]` is repeated.
fn message(name: &str, fields: &[(&str, i32, Type, &str)]) -> DescriptorProto {
    let field = |(name, number, kind, of): &(&str, i32, Type, &str)| {
        let single = name.strip_suffix("[]");
        let label = if single.is_some() { Label::Repeated } else { Label::Optional };
        FieldDescriptorProto {
            name: Some(single.unwrap_or(name).to_owned()),
            number: Some(*number),
            label: Some(label.into()),
            r#type: Some((*kind).into()),
            type_name: Some((*of).to_owned()).filter(|of| !of.is_empty()),
            ..FieldDescriptorProto::default()
        }
    };
    DescriptorProto {
        name: Some(name.to_owned()),
        field: fields.iter().map(field).collect(),
        ..DescriptorProto::default()
    }
}

fn numbers(name: &str, values: &[(&str, i32)]) -> EnumDescriptorProto {
    let value = |(name, number): &(&str, i32)| EnumValueDescriptorProto {
        name: Some((*name).to_owned()),
        number: Some(*number),
        ..EnumValueDescriptorProto::default()
    };
    EnumDescriptorProto {
        name: Some(name.to_owned()),
        value: values.iter().map(value).collect(),
        ..EnumDescriptorProto::default()
    }
}
