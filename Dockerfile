# The image of this package: docs/guide/container.md shows how to build and run it.
#
#   --build-arg TORCH_INDEX=          PyTorch with CUDA, for GPUs
#   --build-arg EXTRAS=s3,ray         other extras of pyproject.toml, such as Ray, which adds 0.3 GB
#   --secret id=pip,src=pip.conf      settings of pip, such as your own package index, which do not stay in the image

# Debian 12 has Python 3.11, with which the tests run.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS wheels
RUN apt-get update -qq && apt-get install -qq --yes --no-install-recommends gcc libc6-dev python3-venv
WORKDIR /source
COPY . .
RUN --mount=type=secret,id=pip,target=/etc/pip.conf deploy/install.sh /venv wheels /wheels

FROM ${BASE}
# liblz4 makes the replay memory faster. KubeRay asks with wget whether a Ray node is healthy.
RUN apt-get update -qq && \
    apt-get install -qq --yes --no-install-recommends ca-certificates liblz4-1 python3-venv wget && \
    rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/* && \
    useradd --uid 1000 --create-home apex && \
    install -d -o apex -g apex -m 0700 /home/apex/runs /home/apex/keys

# The packages of others have their own layer, because they change seldom and are large. Their tests and C++ headers are of
# no use here.
COPY pyproject.toml constraints.txt /source/
COPY apexreplay/pyproject.toml /source/apexreplay/
COPY deploy/install.sh /source/deploy/
ARG EXTRAS=s3
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,target=/root/.cache/pip \
    /source/deploy/install.sh /opt/apex packages "$EXTRAS" && \
    find /opt/apex \( -name test -o -name tests -o -path '*/torch/bin/*test*' -o -path '*/torch/include' \) -prune -exec rm -r {} +
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    /source/deploy/install.sh /opt/apex package /wheels

ENV PATH=/opt/apex/bin:$PATH
# A number, with which Kubernetes can check that the user is not root.
USER 1000
WORKDIR /home/apex
VOLUME /home/apex/runs
ENTRYPOINT ["apex"]
