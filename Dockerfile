# wdsfs in a container. Two variants, by --target:
#
#   fuse    (default) mounts by FUSE, as an ordinary user:
#           docker run --device /dev/fuse --cap-add SYS_ADMIN -v /data:/data:ro wdsfs mount -f '/data/{0..9}.tar' /mnt/set
#   kernel  mounts by the kernel (EROFS), which takes root:
#           docker run --privileged --user 0 ... wdsfs:kernel mount --engine kernel ...
#
# Commands that mount nothing (ls, cat, info, check, pack, export, view) need no rights at all.

FROM python:3.13-slim-trixie AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libfuse3-dev pkg-config \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY packaging/requirements.txt packaging/requirements.txt
RUN python -m venv /opt/wdsfs \
    && /opt/wdsfs/bin/pip install --no-cache-dir --require-hashes --requirement packaging/requirements.txt
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY wdsfs wdsfs
RUN /opt/wdsfs/bin/pip install --no-cache-dir --no-deps .

FROM python:3.13-slim-trixie AS base
LABEL org.opencontainers.image.title="wdsfs" \
      org.opencontainers.image.description="WebDataset shards as directories" \
      org.opencontainers.image.licenses="MIT"
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends fuse3 \
    && rm -rf /var/lib/apt/lists/* \
    && echo user_allow_other >>/etc/fuse.conf \
    && useradd --create-home --uid 1000 wdsfs \
    && install -d -o wdsfs /mnt/set /var/cache/wdsfs
COPY --from=build /opt/wdsfs /opt/wdsfs
ENV PATH=/opt/wdsfs/bin:$PATH \
    WDSFS_INDEX_DIR=/var/cache/wdsfs
ENTRYPOINT ["wdsfs"]
CMD ["--help"]

FROM base AS kernel
# hadolint ignore=DL3002
USER 0

FROM base AS fuse
USER 1000
