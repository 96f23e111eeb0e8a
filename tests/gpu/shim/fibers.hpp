// How a kernel is run.
#pragma once

#include <functional>

#include "cuda.hpp"

namespace shim {
// Runs the body once for each thread of a grid; `threads` is a multiple of 32.
void launch(uint32_t blocks, uint32_t threads, const std::function<void()> &body);
} // namespace shim
