// SPDX-License-Identifier: Apache-2.0
// The library with the kernels for CUDA: see extension.cpp.
#define FL_LIGHTNING_CUDA
#include "extension.cpp"
