# One image for each service; those that run a model have one for CPUs, and one for NVIDIA's GPUs with vLLM:
#
#   docker build --target coordinator -t tandem/coordinator .
#   docker build --target draft       -t tandem/draft .         or --target draft-gpu
#   docker build --target target      -t tandem/target .        or --target target-gpu
#
# And two for Kubernetes (deploy/kubernetes):
#
#   docker build --target demo-models -t tandem/demo-models .
#   docker build --target vllm        -t tandem/vllm .
#
# Every version is fixed: the base image by its tag, the packages by constraints.txt.

FROM python:3.12.13-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
# Without pip in it: nothing is installed in a running container.
RUN python -m venv --without-pip /opt/tandem
COPY constraints.txt pyproject.toml deploy/requirements.py ./


# Our own code, as the wheel has it: with the generated protobuf modules, the `tandem` command, and the CPU kernels
# compiled for each kind of processor. This one of Python's images has a C++ compiler; nothing else of it is kept.
FROM python:3.12.13-bookworm AS code
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
COPY --from=build /opt/tandem /opt/tandem
COPY constraints.txt pyproject.toml LICENSE README.md hatch_build.py ./
COPY protos protos
COPY tandem tandem
COPY draft_service draft_service
COPY target_service target_service
COPY coordinator coordinator
COPY benchmarks/load benchmarks/load
COPY packages/tandem-vllm packages/tandem-vllm
# The wheel's build requirements come from pyproject.toml; this holds what they in turn need.
RUN --mount=type=cache,target=/root/.cache/pip \
    PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
    python -m pip wheel --no-deps --wheel-dir /wheel . ./packages/tandem-vllm \
    && python -m pip --python /opt/tandem/bin/python install --no-deps --target /code /wheel/tandem_speculative-*.whl


FROM build AS coordinator-packages
RUN --mount=type=cache,target=/root/.cache/pip \
    python requirements.py pyproject.toml > requirements.txt \
    && python -m pip --python /opt/tandem/bin/python install -c constraints.txt -r requirements.txt


# torch alone first: gigabytes that change seldom. The default package index has the build for CUDA, which computes on a
# CPU as well; PyTorch's own index has one for CPUs alone, a tenth of the size.
FROM build AS model-packages
ARG TORCH_CPU_INDEX=
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m pip --python /opt/tandem/bin/python install -c constraints.txt \
    ${TORCH_CPU_INDEX:+--no-deps --index-url "$TORCH_CPU_INDEX"} torch
RUN --mount=type=cache,target=/root/.cache/pip \
    python requirements.py pyproject.toml engine > requirements.txt \
    && python -m pip --python /opt/tandem/bin/python install -c constraints.txt -r requirements.txt


# What every image is made on: no compiler, no pip, a user without a name or a home. This user may write no bytecode, and
# the base image has none of the standard library: without it each health check compiles what it imports.
FROM python:3.12.13-slim-bookworm AS runtime
RUN python -m pip --no-cache-dir uninstall --quiet --yes --root-user-action ignore pip \
    && python -c "import ensurepip, os, shutil; shutil.rmtree(os.path.dirname(ensurepip.__file__))" \
    && python -m compileall -q -j 0 "$(python -c 'import os; print(os.path.dirname(os.__file__))')"
# Behind that line, which needs the base image's own Python.
ENV PATH=/opt/tandem/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /opt/tandem/lib/python3.12/site-packages
USER 10001:10001
STOPSIGNAL SIGTERM


# The packages first, then our code, which is the same in all: the coordinator has no torch, so no model runs there.
FROM runtime AS coordinator
COPY --from=coordinator-packages /opt/tandem /opt/tandem
COPY --from=code /code/bin/tandem /opt/tandem/bin/tandem
COPY --from=code /code/tandem_speculative-*.dist-info tandem_speculative.dist-info
COPY --from=code /code/tandem tandem
COPY --from=code /code/tandem_coordinator tandem_coordinator
COPY --from=code /code/tandem_load tandem_load
ENV TANDEM_COORDINATOR_HOST=0.0.0.0
EXPOSE 8000
EXPOSE 50051
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-P", "-m", "tandem.serving.healthcheck", "127.0.0.1:50051"]
ENTRYPOINT ["python", "-P", "-m", "tandem_coordinator"]


FROM runtime AS draft
COPY --from=model-packages /opt/tandem /opt/tandem
COPY --from=code /code/tandem_speculative-*.dist-info tandem_speculative.dist-info
COPY --from=code /code/tandem tandem
COPY --from=code /code/tandem_draft tandem_draft
ENV TANDEM_DRAFT_HOST=0.0.0.0
EXPOSE 50053
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-P", "-m", "tandem.serving.healthcheck", "127.0.0.1:50053"]
ENTRYPOINT ["python", "-P", "-m", "tandem_draft"]


FROM runtime AS target
COPY --from=model-packages /opt/tandem /opt/tandem
COPY --from=code /code/tandem_speculative-*.dist-info tandem_speculative.dist-info
COPY --from=code /code/tandem tandem
COPY --from=code /code/tandem_target tandem_target
ENV TANDEM_TARGET_HOST=0.0.0.0
EXPOSE 50052
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-P", "-m", "tandem.serving.healthcheck", "127.0.0.1:50052"]
ENTRYPOINT ["python", "-P", "-m", "tandem_target"]


# The bundled pair, for pods without a volume of models: an init container that copies it to where the services look.
FROM runtime AS demo-models
WORKDIR /demo
COPY models/demo/draft /demo/draft
COPY models/demo/target /demo/target
ENTRYPOINT ["cp", "-R", "/demo/.", "/models/"]


# A stock vLLM that can draft from our draft services (docs/vllm.md). Its own packages stay as they are, apart from those
# that the wheel needs and it lacks; the extra `vllm` has the release of this tag. The image has a user without rights,
# whom Kubernetes names by number.
FROM vllm/vllm-openai:v0.32.0 AS vllm
COPY --from=code /wheel /wheel
RUN --mount=type=cache,target=/root/.cache/uv \
    wheel=$(echo /wheel/tandem_speculative-*.whl) \
    && uv pip install --system "${wheel}[engine,vllm]" /wheel/tandem_vllm-*.whl \
    && rm -r /wheel
USER 2000:2000


# The same packages under our own services. CUDA and a compiler are there, since kernels are compiled at the first start;
# the home holds them, and torch wants to know the user's name.
FROM vllm AS gpu
USER 0:0
RUN groupadd --gid 10001 tandem \
    && useradd --uid 10001 --gid tandem --create-home tandem \
    && install -d -o tandem -g tandem /huggingface \
    && { command -v python || ln -s "$(command -v python3)" /usr/local/bin/python; }
ENV HOME=/home/tandem \
    TORCHINDUCTOR_CACHE_DIR=/home/tandem/.cache/torchinductor \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /home/tandem
USER 10001:10001
STOPSIGNAL SIGTERM


FROM gpu AS draft-gpu
ENV TANDEM_DRAFT_HOST=0.0.0.0 \
    TANDEM_DRAFT_ENGINE=vllm \
    TANDEM_DRAFT_DEVICE=cuda
EXPOSE 50053
HEALTHCHECK --interval=10s --timeout=5s --start-period=1800s --retries=3 \
    CMD ["python", "-P", "-m", "tandem.serving.healthcheck", "127.0.0.1:50053"]
ENTRYPOINT ["python", "-P", "-m", "tandem_draft"]


FROM gpu AS target-gpu
ENV TANDEM_TARGET_HOST=0.0.0.0 \
    TANDEM_TARGET_ENGINE=vllm \
    TANDEM_TARGET_DEVICE=cuda
EXPOSE 50052
HEALTHCHECK --interval=10s --timeout=5s --start-period=1800s --retries=3 \
    CMD ["python", "-P", "-m", "tandem.serving.healthcheck", "127.0.0.1:50052"]
ENTRYPOINT ["python", "-P", "-m", "tandem_target"]
