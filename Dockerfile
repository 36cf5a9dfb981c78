# The server on a CPU. Build: docker build -t onestem --build-arg TORCH_INDEX=URL .     Run: docs/operating.md, "In a container".
FROM python:3.12-slim AS build
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends g++ cmake ninja-build \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /venv
ENV PATH=/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
COPY constraints.txt .
# torch first: what follows finds it there. TORCH_INDEX names an index that has builds without CUDA;
# without it the default index's build is taken, which on x86-64 brings gigabytes of CUDA along.
ARG TORCH_INDEX=
RUN pip install -q ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} \
    "$(grep -i '^torch==' constraints.txt)"
COPY . .
# Instructions are chosen when it runs, not when it is built: the image serves any CPU of its kind.
RUN grep -vi '^\(torch\|triton\)==' constraints.txt > /tmp/constraints.txt \
    && pip install -q -c /tmp/constraints.txt .

FROM python:3.12-slim
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --create-home --uid 10001 onestem \
    && mkdir /state && chown onestem /state
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1
USER onestem
VOLUME /state
EXPOSE 8000
HEALTHCHECK --start-period=300s --interval=15s --timeout=5s CMD \
    ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["onestem", "serve", "--host", "0.0.0.0", "--state", "/state"]
