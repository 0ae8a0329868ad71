# An image with StreamAttn installed on a CUDA build of PyTorch. It was not built where it was written.
# Build: `docker build -t streamattn .`
# Run, with the trained model in ./runs afterwards:
# `docker run --rm --gpus all --ipc=host -v "$PWD/runs:/streamattn/runs" streamattn finetune configs/gpt2-nano_stdlib_cpu.yaml`
FROM python:3.12-slim

# Triton compiles its launchers with the C compiler, at the first call of each kernel. torch's own wheels carry the CUDA
# libraries, so the image needs no CUDA base; the host's driver comes with --gpus.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /streamattn
COPY . .
RUN pip install --no-cache-dir -e .

ENTRYPOINT ["streamattn"]
CMD ["info"]
