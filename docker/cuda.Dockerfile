# acrlpd for NVIDIA GPUs: the CPU image's versions, and JAX's CUDA libraries. The host needs only the driver.
#
#   docker build -f docker/cuda.Dockerfile --build-arg COMMIT=$(git rev-parse --short=12 HEAD) -t acrlpd:cuda .
#   docker run --rm --gpus all -v $PWD:/work acrlpd:cuda doctor
FROM python:3.11-slim-bookworm

RUN apt-get update && apt-get install -y --no-install-recommends libegl1 libgl1 libegl-mesa0 libgl1-mesa-dri \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/acrlpd
COPY .ci/requirements.lock .ci/
RUN pip install --no-cache-dir --require-hashes --no-deps --requirement .ci/requirements.lock
# The lock file decides the version of JAX, and that version names its CUDA plugin. The lock file has no CUDA libraries,
# which are gigabytes that tests do not need: pip chooses them as the plugin asks, without hashes.
RUN sed -e '/--hash=/d' -e 's/ \\$//' .ci/requirements.lock > constraints.txt \
    && pip install --no-cache-dir --constraint constraints.txt 'jax[cuda13]'
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src src
ARG COMMIT=unknown
RUN echo "$COMMIT" > src/acrlpd/commit.txt \
    && pip install --no-cache-dir --no-deps --no-build-isolation . && acrlpd --version

# The driver gives compute and, for rendering on the GPU, graphics.
ENV MUJOCO_GL=egl NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics
WORKDIR /work
ENTRYPOINT ["acrlpd"]
CMD ["doctor"]
