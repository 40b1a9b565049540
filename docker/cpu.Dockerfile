# acrlpd on a CPU, with the simulators and the server, in the versions that the tests ran with.
#
#   docker build -f docker/cpu.Dockerfile --build-arg COMMIT=$(git rev-parse --short=12 HEAD) -t acrlpd:cpu .
#   docker run --rm -v $PWD:/work acrlpd:cpu train --config quickstart --exp_name first
FROM python:3.11-slim-bookworm

# EGL renders without a display.
RUN apt-get update && apt-get install -y --no-install-recommends libegl1 libgl1 libegl-mesa0 libgl1-mesa-dri \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/acrlpd
COPY .ci/requirements.lock .ci/
# The lock file is complete and binds every file by its hash. Docker keeps this layer until the lock file changes.
RUN pip install --no-cache-dir --require-hashes --no-deps --requirement .ci/requirements.lock
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src src
ARG COMMIT=unknown
RUN echo "$COMMIT" > src/acrlpd/commit.txt \
    && pip install --no-cache-dir --no-deps --no-build-isolation . && acrlpd --version

ENV MUJOCO_GL=egl
WORKDIR /work
ENTRYPOINT ["acrlpd"]
CMD ["--help"]
