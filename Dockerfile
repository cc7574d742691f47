# jaxtrain with the versions that are tested together.
#   docker build -t jaxtrain .                                      # CPU
#   docker build -t jaxtrain --build-arg EXTRAS=data,hf,cuda .      # NVIDIA GPUs
#   docker build -t jaxtrain --build-arg EXTRAS=data,hf,islands .   # islands: docs/islands.md
#   docker run --rm -v "$PWD:/work" jaxtrain train quickstart
#   docker run --rm -v "$PWD:/work" --gpus all --shm-size 8g jaxtrain train my.yaml
FROM python:3.11-slim
ARG EXTRAS=data,hf
WORKDIR /src
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY jaxtrain ./jaxtrain
COPY configs ./configs
RUN pip install --no-cache-dir -c requirements.lock ".[${EXTRAS}]"
RUN jaxtrain --version && jaxtrain layouts
WORKDIR /work
ENTRYPOINT ["jaxtrain"]
CMD ["--help"]
