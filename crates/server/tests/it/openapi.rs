//! Tests that the OpenAPI document and the routes match.

use std::collections::BTreeSet;

use tidegate_server::{Access, routes};

use crate::kit::codec::Value;
use crate::kit::{Kit, send};

#[tokio::test]
async fn document_and_routes_match() {
    let kit = Kit::new().await;
    let document = send(kit.request("GET", "/v1/openapi.json")).await.body;
    assert_eq!(document["openapi"], "3.1.0");
    let mut documented = BTreeSet::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            documented.insert((
                method.to_uppercase(),
                path.clone(),
                operation["security"][0]["token"][0].clone().to_string(),
            ));
        }
    }
    let scope = |access| match access {
        Access::Public => "null".to_owned(),
        Access::Scope(scope) => format!("\"{scope}\""),
    };
    let routed: BTreeSet<_> = routes()
        .into_iter()
        .map(|route| (route.method.to_string(), route.path.to_owned(), scope(route.access)))
        .collect();
    assert_eq!(routed.len(), routes().len(), "duplicate route");
    assert_eq!(documented, routed);

    // Every documented route responds, and other methods are rejected.
    for (method, path, _) in &documented {
        let path = path.replace(['{', '}'], "");
        let answer = kit.ask(method, &path, None).await;
        assert!(!matches!(answer.kind(), "no-route" | "no-method"), "{method} {path}: {}", answer.text);
        kit.ask("PATCH", &path, None).await.is_problem(405, "no-method", "");
    }
}

#[tokio::test]
async fn document_references_resolve_and_names_are_unique() {
    fn walk<'a>(value: &'a Value, found: &mut Vec<(&'a str, &'a str)>) {
        match value {
            Value::Object(fields) => {
                for (key, value) in fields {
                    if let (true, Some(text)) = (key == "$ref" || key == "operationId", value.as_str()) {
                        found.push((key, text));
                    }
                    if let ("links", Some(links)) = (key.as_str(), value.as_object()) {
                        // A link refers to an operation and does not define one.
                        let to = links.values().filter_map(|link| link["operationId"].as_str());
                        found.extend(to.map(|text| ("link", text)));
                        continue;
                    }
                    walk(value, found);
                }
            }
            Value::Array(items) => items.iter().for_each(|item| walk(item, found)),
            _ => {}
        }
    }
    let kit = Kit::new().await;
    let document = kit.get("/v1/openapi.json").await.body;
    let mut found = Vec::new();
    walk(&document, &mut found);
    let (mut names, mut links) = (BTreeSet::new(), BTreeSet::new());
    for (key, text) in found {
        if key == "link" {
            links.insert(text);
        } else if key == "$ref" {
            let name = text.strip_prefix("#/components/schemas/").unwrap_or_else(|| panic!("{text}"));
            assert!(document["components"]["schemas"][name].is_object(), "{text} does not resolve");
        } else {
            assert!(names.insert(text), "duplicate name {text}");
        }
    }
    assert_eq!(names.len(), routes().len());
    assert_eq!(links.len(), 7, "six lease operations and one token revocation");
    assert!(links.is_subset(&names), "{links:?}");
}
