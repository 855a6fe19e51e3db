# A server for OpenAI clients. Build it in the root of a clone:
#
#   mkdir keys && cacheblend-rag keys add keys/keys.json --name notebook --tenant me
#   docker build -f examples/serve.Dockerfile -t cacheblend-serve .
#   docker run -p 8000:8000 -v kv:/kv -v ./keys:/keys:ro cacheblend-serve --model Qwen/Qwen2.5-0.5B-Instruct
#
# Without a GPU, use the smaller CPU build of torch: --build-arg PIP_EXTRA_INDEX_URL=... with the address from PyTorch's
# installation page. With a GPU, run with --gpus all.
FROM python:3.11-slim
ARG PIP_EXTRA_INDEX_URL
COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt /src /src/integrations/attachments /src/integrations/serve && rm -rf /src
RUN useradd --create-home serve && mkdir /kv && chown serve /kv
USER serve
VOLUME /kv
EXPOSE 8000
HEALTHCHECK --interval=30s --start-period=300s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/readyz')"]
ENTRYPOINT ["cacheblend-rag", "serve", "--store", "/kv", "--host", "0.0.0.0", "--keys", "/keys/keys.json"]
