// A buffer that direct I/O takes.
#pragma once

#include <cstddef>
#include <cstdlib>

#include "ucm/geometry.h"

namespace ucm::slab {

/// `data` is null when there is no memory. `n` is a multiple of kIoAlign.
struct Aligned {
  explicit Aligned(std::size_t n) noexcept
      : data(static_cast<std::byte*>(std::aligned_alloc(kIoAlign, n))) {}
  ~Aligned() { std::free(data); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  std::byte* const data;
};

}  // namespace ucm::slab
