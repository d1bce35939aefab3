# Bastile on NVIDIA's PyTorch image:
#
#     docker build -t bastile .
#     docker run --rm --gpus all -v $PWD:/work bastile profile --shape qwen3-0.6b
#
# Another image is good where its PyTorch is 2.10 or newer: --build-arg IMAGE=nvcr.io/nvidia/pytorch:YY.MM-py3.
ARG IMAGE=nvcr.io/nvidia/pytorch:25.12-py3
FROM ${IMAGE}

# What the commands need beside PyTorch. The image's own PyTorch stays: its constraints file holds it in place.
RUN pip install --no-cache-dir "transformers>=5.0" "accelerate>=1.1" "rich>=13" "matplotlib>=3.8" "peft>=0.18" "datasets>=3"

COPY . /opt/bastile
# Without dependencies: to pip, the image's 2.10.0a0 is older than the 2.10 that Bastile names.
RUN pip install --no-cache-dir --no-deps /opt/bastile

# Loads the library and registers the operators, which needs no GPU; fails here where the image's PyTorch is too old.
RUN bastile --help

WORKDIR /work
ENTRYPOINT ["bastile"]
CMD ["--help"]
