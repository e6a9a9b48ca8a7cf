# The operator and the console, without torch. From the repository's root:
#   docker build -f tools/images/operator.Dockerfile -t tidegate/operator:0.1.0 .
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md constraints.txt ./
COPY operator operator
COPY engine engine
COPY policies policies
COPY cli cli
RUN python -m venv /opt/tidegate \
 && /opt/tidegate/bin/pip install --no-cache-dir --constraint constraints.txt '.[console]'

FROM python:3.11-slim
COPY --from=build /opt/tidegate /opt/tidegate
ENV PATH=/opt/tidegate/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# A number: Kubernetes can't tell whether a name is root.
USER 65532:65532
ENTRYPOINT ["python", "-m"]
CMD ["tidegate_operator"]
