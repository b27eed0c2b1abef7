//! A minimal server of the protocol: decodes the request and responds OK.

use std::io::{Write as _, stdout};
use std::net::SocketAddr;

use anyhow::Result;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_server::{
    RateLimitService, RateLimitServiceServer,
};
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use serde_json::json;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

struct MinimalService;

#[tonic::async_trait]
impl RateLimitService for MinimalService {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let status = DescriptorStatus { code: Code::Ok.into(), ..DescriptorStatus::default() };
        Ok(Response::new(RateLimitResponse {
            overall_code: Code::Ok.into(),
            statuses: vec![status; request.get_ref().descriptors.len()],
            ..RateLimitResponse::default()
        }))
    }
}

/// Serves until the process is killed.
pub(crate) async fn serve(listen: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(listen).await?;
    let ready = json!({ "envoy": listener.local_addr()?.to_string(), "token": "none" });
    writeln!(stdout(), "{ready}")?;
    let service = RateLimitServiceServer::new(MinimalService);
    let server = Server::builder().tcp_nodelay(true).add_service(service);
    Ok(server.serve_with_incoming(TcpListenerStream::new(listener)).await?)
}
