// First touch of large buffers: at set-up and by several threads, not page by page in the first copies.
#pragma once

#include <cstdint>

namespace ucm::memory {

/// How a page is touched where the kernel cannot do it in one call (Linux before 5.14).
enum class Touch : std::uint8_t {
  kRead,   ///< pages exist, others may be using them
  kWrite,  ///< nobody else has them; they are zero and stay so
};

/// Make every page of the mapping present and writable in this process, so that no later access
/// faults. `threads` 0: one per CPU, at most 16. Returns 0 or errno (ENOMEM: the machine does not have
/// that much).
int populate(void* data, std::uint64_t bytes, unsigned threads, Touch touch) noexcept;

}  // namespace ucm::memory
