#!/usr/bin/env bash
# Build llama.cpp's server, and keep its converter of LoRA adapters, from the source package of llama-cpp-python (5 to 15
# minutes; needs cmake and a C++ compiler).
#   setup_llama.sh DIR
set -euo pipefail
dir=${1:?usage: setup_llama.sh DIR}
mkdir -p "$dir" && cd "$dir"
if [ ! -x src/vendor/llama.cpp/build/bin/llama-server ]; then
    pip download -q --no-deps --no-binary :all: llama-cpp-python
    mkdir -p src && tar xzf llama_cpp_python-*.tar.gz -C src --strip-components 1 && rm llama_cpp_python-*.tar.gz
    cd src/vendor/llama.cpp
    cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF > /dev/null
    cmake --build build --target llama-server -j "$(nproc)" > /dev/null
    cd "$OLDPWD"
fi
src/vendor/llama.cpp/build/bin/llama-server --version 2>&1 | head -1
