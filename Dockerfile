# geartrain from a wheel, on a machine without a compiler: docker build --build-arg EXTRAS=torch,cli -t geartrain .
# `make wheels` fills dist/, from which it is installed; NumPy and the extras come from the index.
FROM python:3.12-slim-bookworm AS wheel
COPY dist/ /dist/
ARG EXTRAS=cli
RUN python -m venv /opt/geartrain \
 && /opt/geartrain/bin/pip install --no-cache-dir --only-binary :all: --find-links /dist "geartrain[${EXTRAS}]==0.1.0"

FROM python:3.12-slim-bookworm
COPY --from=wheel /opt/geartrain /opt/geartrain
ENV PATH=/opt/geartrain/bin:$PATH
RUN useradd --create-home --uid 1000 geartrain
USER 1000
WORKDIR /home/geartrain
HEALTHCHECK NONE
ENTRYPOINT ["geartrain"]
CMD ["doctor"]
