/* cuda_runtime.h: as CUDA's. */
#pragma once
#include "cuda_runtime_api.h"
