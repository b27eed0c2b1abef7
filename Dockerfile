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
# busybox is installed as `wget`: the health check needs nothing else of it.
COPY --from=build /out/bin/ /usr/local/bin/
# A new volume gets the owner of this folder.
COPY --from=build --chown=65532:65532 /out/data /var/lib/tidegate
USER 65532:65532
ENV TIDEGATE_STORE=sqlite:/var/lib/tidegate/tidegate.db
# The health check connects here from inside the container, without a certificate.
ENV TIDEGATE_METRICS=127.0.0.1:9090
VOLUME /var/lib/tidegate
EXPOSE 8707
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s --retries=3 \
    CMD ["/usr/local/bin/wget", "-q", "-O", "/dev/null", "http://127.0.0.1:9090/health/ready"]
ENTRYPOINT ["/usr/local/bin/tidegate"]
# Listens on 127.0.0.1 of the container, which is unreachable from outside. To expose it:
# serve --listen 0.0.0.0:8707 --without-tls
CMD ["serve"]
