# tidegate in a container: docs/run.md says how to run it.
FROM rust:1.95-bookworm AS build
RUN apt-get update && apt-get install --yes --no-install-recommends busybox-static
WORKDIR /src
COPY . .
RUN cargo build --profile dist --locked -p tidegate-cli
RUN install -D -m 0755 target/dist/tidegate /out/bin/tidegate \
 && install -m 0755 /bin/busybox /out/bin/wget \
 && install -d -m 0700 /out/data

# The C library, and a user without rights (65532). No shell, no package manager.
FROM gcr.io/distroless/cc-debian12:nonroot
# The program, and busybox under the name of the one thing it is there for.
COPY --from=build /out/bin/ /usr/local/bin/
# A new volume belongs to whom this folder belongs to.
COPY --from=build --chown=65532:65532 /out/data /var/lib/tidegate
USER 65532:65532
ENV TIDEGATE_STORE=sqlite:/var/lib/tidegate/tidegate.db
# The health check asks here, inside of the container: it has no certificate, and needs none.
ENV TIDEGATE_METRICS=127.0.0.1:9090
VOLUME /var/lib/tidegate
EXPOSE 8707
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s --retries=3 \
    CMD ["/usr/local/bin/wget", "-q", "-O", "/dev/null", "http://127.0.0.1:9090/health/ready"]
ENTRYPOINT ["/usr/local/bin/tidegate"]
# On 127.0.0.1 of the container, which nobody outside reaches. To be reached, say so: serve --listen 0.0.0.0:8707 --without-tls
CMD ["serve"]
