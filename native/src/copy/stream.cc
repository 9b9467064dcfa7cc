#include "copy/stream.h"

#include <array>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define UCM_COPY_X86 1
#else
#define UCM_COPY_X86 0
#endif

namespace ucm::copy {
namespace {

#if UCM_COPY_X86

constexpr std::size_t kLine = 64;
constexpr std::size_t kBlock = 4 * kLine;
/// How far ahead of the loads the source is prefetched; hardware stops at page borders.
constexpr std::size_t kAhead = 4096;

/// Ordinary copy up to the first whole destination line. Returns how many bytes that was.
std::size_t copy_head(std::byte* dst, const std::byte* src, std::size_t n) noexcept {
  std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(dst) % kLine) % kLine;
  if (head > n) head = n;
  std::memcpy(dst, src, head);
  return head;
}

inline void prefetch_block(const std::byte* src, std::size_t left) noexcept {
  if (left < kAhead + kBlock) return;  // never reach past the source range
  for (std::size_t line = 0; line < kBlock; line += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(src + kAhead + line), _MM_HINT_T0);
  }
}

__attribute__((target("avx512f"))) void stream_avx512(std::byte* dst, const std::byte* src,
                                                      std::size_t n) noexcept {
  const std::size_t head = copy_head(dst, src, n);
  dst += head, src += head, n -= head;
  for (; n >= kBlock; dst += kBlock, src += kBlock, n -= kBlock) {
    prefetch_block(src, n);
    const __m512i a = _mm512_loadu_si512(src);
    const __m512i b = _mm512_loadu_si512(src + 64);
    const __m512i c = _mm512_loadu_si512(src + 128);
    const __m512i d = _mm512_loadu_si512(src + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 192), d);
  }
  for (; n >= kLine; dst += kLine, src += kLine, n -= kLine) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
  }
  std::memcpy(dst, src, n);
}

__attribute__((target("avx2"))) void stream_avx2(std::byte* dst, const std::byte* src,
                                                 std::size_t n) noexcept {
  const std::size_t head = copy_head(dst, src, n);
  dst += head, src += head, n -= head;
  const auto line =
      [](std::byte * to, const std::byte* from) __attribute__((target("avx2"), always_inline)) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), b);
  };
  for (; n >= kBlock; dst += kBlock, src += kBlock, n -= kBlock) {
    prefetch_block(src, n);
    for (std::size_t at = 0; at < kBlock; at += kLine) line(dst + at, src + at);
  }
  for (; n >= kLine; dst += kLine, src += kLine, n -= kLine) line(dst, src);
  std::memcpy(dst, src, n);
}

void stream_sse2(std::byte* dst, const std::byte* src, std::size_t n) noexcept {
  const std::size_t head = copy_head(dst, src, n);
  dst += head, src += head, n -= head;
  const auto line = [](std::byte* to, const std::byte* from) {
    const auto* in = reinterpret_cast<const __m128i*>(from);
    auto* out = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  };
  for (; n >= kBlock; dst += kBlock, src += kBlock, n -= kBlock) {
    prefetch_block(src, n);
    for (std::size_t at = 0; at < kBlock; at += kLine) line(dst + at, src + at);
  }
  for (; n >= kLine; dst += kLine, src += kLine, n -= kLine) line(dst, src);
  std::memcpy(dst, src, n);
}

const auto& kernels() noexcept {
  static const std::array<StreamKernel, 4> all{{
      {"avx512", stream_avx512, __builtin_cpu_supports("avx512f") != 0},
      {"avx2", stream_avx2, __builtin_cpu_supports("avx2") != 0},
      {"sse2", stream_sse2, true},
      {"memcpy", nullptr, true},
  }};
  return all;
}

#else

const auto& kernels() noexcept {
  static const std::array<StreamKernel, 1> all{{{"memcpy", nullptr, true}}};
  return all;
}

#endif

}  // namespace

std::span<const StreamKernel> stream_kernels() noexcept { return kernels(); }

void stream_fence() noexcept {
#if UCM_COPY_X86
  _mm_sfence();
#endif
}

}  // namespace ucm::copy
