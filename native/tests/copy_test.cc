#include "ucm/copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "copy/stream.h"

namespace ucm {
namespace {

constexpr std::byte kGuard{0xA5};

std::vector<std::byte> noise(std::size_t n, unsigned seed) {
  std::mt19937 rng(seed);
  std::vector<std::byte> out(n);
  for (auto& b : out) b = static_cast<std::byte>(rng());
  return out;
}

std::uint64_t address(const std::byte* p) { return reinterpret_cast<std::uint64_t>(p); }

// Every size around the line, block and prefetch borders, at every alignment of both ends.
TEST(StreamKernels, EverySizeAndAlignmentCopiesExactly) {
  std::vector<std::size_t> sizes;
  for (std::size_t n = 0; n <= 600; ++n) sizes.push_back(n);
  for (std::size_t base : {1024u, 4096u, 4352u, 8192u, 12288u}) {
    for (int d : {-65, -64, -1, 0, 1, 63, 64, 65}) sizes.push_back(base + d);
  }
  const auto src = noise(16384, 1);
  std::vector<std::byte> dst(16384 + 256);
  for (const auto& kernel : copy::stream_kernels()) {
    if (!kernel.supported || kernel.fn == nullptr) continue;
    SCOPED_TRACE(kernel.name);
    for (std::size_t n : sizes) {
      for (std::size_t shift : {0u, 1u, 7u, 16u, 31u, 32u, 63u}) {
        for (std::size_t from : {0u, 1u, 16u, 33u}) {
          std::memset(dst.data(), 0xA5, n + 192);
          std::byte* to = dst.data() + 64 + shift;
          kernel.fn(to, src.data() + from, n);
          copy::stream_fence();
          ASSERT_EQ(std::memcmp(to, src.data() + from, n), 0) << n << ' ' << shift << ' ' << from;
          ASSERT_EQ(to[-1], kGuard) << n << ' ' << shift;
          ASSERT_EQ(to[n], kGuard) << n << ' ' << shift;
        }
      }
    }
  }
}

// All kinds of pieces: tiny, odd, around the streaming limits; contiguous, strided and touching.
TEST(CopyRuns, GatherThenScatterEqualsTheReference) {
  for (std::uint64_t bytes : {1u, 3u, 64u, 255u, 256u, 257u, 1000u, 4096u, 33333u}) {
    for (std::uint64_t count : {1u, 2u, 5u, 64u}) {
      for (std::uint64_t gap : {0u, 1u, 17u, 512u}) {
        const std::size_t runs = 3;
        const RunShape shape{bytes, count, bytes + gap};
        const std::size_t span = count * (bytes + gap) + 7;
        auto engine = noise(runs * span, 7);
        std::vector<std::uint64_t> addresses;
        std::vector<std::byte> expected;
        for (std::size_t r = 0; r < runs; ++r) {
          const std::byte* start = engine.data() + ((r * 2) % runs) * span;  // not in order
          addresses.push_back(address(start));
          for (std::uint64_t i = 0; i < count; ++i) {
            const std::byte* piece = start + i * shape.stride;
            expected.insert(expected.end(), piece, piece + bytes);
          }
        }
        std::vector<std::byte> buffer(expected.size() + 1, kGuard);
        copy_runs_in(buffer.data(), addresses.data(), runs, shape);
        ASSERT_EQ(buffer.back(), kGuard);
        buffer.pop_back();
        ASSERT_EQ(buffer, expected) << bytes << 'x' << count << '+' << gap;

        auto back = std::vector<std::byte>(engine.size(), kGuard);
        std::vector<std::uint64_t> out;
        for (auto a : addresses) out.push_back(a - address(engine.data()) + address(back.data()));
        out[1] = 0;
        copy_runs_out(buffer.data(), out.data(), runs, shape);
        std::vector<std::byte> want(engine.size(), kGuard);
        for (std::size_t r = 0; r < runs; ++r) {
          if (r == 1) continue;
          const std::size_t at = addresses[r] - address(engine.data());
          for (std::uint64_t i = 0; i < count; ++i) {
            std::memcpy(&want[at + i * shape.stride], &engine[at + i * shape.stride], bytes);
          }
        }
        ASSERT_EQ(back, want) << bytes << 'x' << count << '+' << gap;
      }
    }
  }
}

TEST(CopyBytes, LargeAndSmall) {
  for (std::size_t n : {0u, 1u, 4095u, 32768u, 1048577u}) {
    const auto src = noise(n, 3);
    std::vector<std::byte> dst(n + 1, kGuard);
    copy_bytes(dst.data(), src.data(), n);
    ASSERT_TRUE(std::equal(src.begin(), src.end(), dst.begin()));
    ASSERT_EQ(dst[n], kGuard);
  }
}

TEST(CopyBytes, NamesAKernelTheCpuHas) {
  bool found = false;
  for (const auto& kernel : copy::stream_kernels()) {
    found |= kernel.supported && std::strcmp(kernel.name, copy_kernel_name()) == 0;
  }
  EXPECT_TRUE(found);
}

}  // namespace
}  // namespace ucm
