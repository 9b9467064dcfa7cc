#include "ucm/copy.h"

#include <cstring>

#include "copy/stream.h"

// Sanitizers see memcpy and ordinary stores but not non-temporal ones: their builds copy plainly so
// that a copy outside its buffer, or a race on it, is found.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define UCM_COPY_PLAIN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define UCM_COPY_PLAIN 1
#endif
#endif
#ifndef UCM_COPY_PLAIN
#define UCM_COPY_PLAIN 0
#endif

namespace ucm {
namespace {

const copy::StreamKernel& chosen() noexcept {
  static const copy::StreamKernel kernel = [] {
    for (const auto& k : copy::stream_kernels()) {
      if (k.supported && (!UCM_COPY_PLAIN || k.fn == nullptr)) return k;
    }
    return copy::StreamKernel{"memcpy", nullptr, true};
  }();
  return kernel;
}

/// How pieces of one call are copied; decided once per call, not per piece.
class Mover {
 public:
  Mover(std::size_t total, std::size_t piece) noexcept
      : stream_(total >= kStreamThreshold && piece >= kStreamMinPiece ? chosen().fn : nullptr) {}
  ~Mover() {
    if (stream_ != nullptr) copy::stream_fence();
  }
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  void operator()(std::byte* dst, const std::byte* src, std::size_t n) const noexcept {
    if (stream_ != nullptr) {
      stream_(dst, src, n);
    } else {
      std::memcpy(dst, src, n);
    }
  }

 private:
  copy::StreamFn stream_;
};

/// Pieces that touch are one piece.
RunShape merged(const RunShape& run) noexcept {
  if (run.count > 1 && run.stride == run.bytes) return {run.total(), 1, 0};
  return run;
}

}  // namespace

void copy_bytes(void* dst, const void* src, std::size_t n) noexcept {
  if (n == 0) return;  // null is fine then, but not for memcpy
  Mover{n, n}(static_cast<std::byte*>(dst), static_cast<const std::byte*>(src), n);
}

void copy_runs_in(std::byte* dst, const std::uint64_t* addresses, std::size_t runs,
                  const RunShape& run) noexcept {
  const RunShape shape = merged(run);
  const Mover move{runs * shape.total(), shape.bytes};
  for (std::size_t r = 0; r < runs; ++r) {
    const auto* src = reinterpret_cast<const std::byte*>(addresses[r]);
    for (std::uint64_t i = 0; i < shape.count; ++i) {
      move(dst, src, shape.bytes);
      dst += shape.bytes;
      src += shape.stride;
    }
  }
}

void copy_runs_out(const std::byte* src, const std::uint64_t* addresses, std::size_t runs,
                   const RunShape& run) noexcept {
  const RunShape shape = merged(run);
  const Mover move{runs * shape.total(), shape.bytes};
  for (std::size_t r = 0; r < runs; ++r) {
    if (addresses[r] == 0) {
      src += shape.total();
      continue;
    }
    auto* dst = reinterpret_cast<std::byte*>(addresses[r]);
    for (std::uint64_t i = 0; i < shape.count; ++i) {
      move(dst, src, shape.bytes);
      src += shape.bytes;
      dst += shape.stride;
    }
  }
}

const char* copy_kernel_name() noexcept { return chosen().name; }

}  // namespace ucm
