# The worker, the beat and the command line in one image: docker compose chooses which.
FROM python:3.12-slim AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --wheel-dir /wheels '.[postgres]'

FROM python:3.12-slim
# PYTHONSAFEPATH: the working directory must not make a module importable by another name.
ENV PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --find-links /wheels 'handrail[postgres]' \
    && useradd --create-home handrail
USER handrail
WORKDIR /home/handrail
ENTRYPOINT ["handrail"]
CMD ["worker"]
