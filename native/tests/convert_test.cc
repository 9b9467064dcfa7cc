#include "ucm/convert.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

namespace ucm {
namespace {

using Sizes = std::vector<std::uint64_t>;

// Byte by byte, straight from the definition.
void reference(const Sizes& extents, const Sizes& src_strides, const Sizes& dst_strides,
               std::uint64_t inner, const std::vector<std::byte>& src,
               std::vector<std::byte>& dst) {
  Sizes index(extents.size(), 0);
  for (;;) {
    std::uint64_t s = 0, d = 0;
    for (std::size_t k = 0; k < extents.size(); ++k) {
      s += index[k] * src_strides[k];
      d += index[k] * dst_strides[k];
    }
    std::memcpy(&dst[d], &src[s], inner);
    std::size_t k = extents.size();
    while (k > 0 && ++index[k - 1] == extents[k - 1]) index[--k] = 0;
    if (k == 0) return;
  }
}

TEST(ConvertPlan, RandomPermutationsEqualTheDefinition) {
  std::mt19937 rng(11);
  for (int round = 0; round < 400; ++round) {
    const std::size_t dims = rng() % 5;
    const std::uint64_t inner =
        std::vector<std::uint64_t>{1, 2, 3, 4, 8, 16, 48, 128, 4096}[rng() % 9];
    Sizes extents(dims), src_strides(dims), dst_strides(dims);
    for (auto& e : extents) e = 1 + rng() % (round % 10 == 0 ? 40 : 5);
    std::uint64_t total[2];
    for (int side = 0; side < 2; ++side) {
      std::vector<std::size_t> order(dims);
      std::iota(order.begin(), order.end(), 0u);
      std::shuffle(order.begin(), order.end(), rng);
      std::uint64_t stride = inner + (rng() % 3 == 0 ? 5 : 0);
      for (std::size_t k : order) {
        (side == 0 ? src_strides : dst_strides)[k] = stride;
        stride *= extents[k];
        if (rng() % 4 == 0) stride += 3;  // padding between rows
      }
      total[side] = stride;
    }
    std::vector<std::byte> src(total[0]);
    for (auto& b : src) b = static_cast<std::byte>(rng());
    std::vector<std::byte> got(total[1] + 1, std::byte{0xEE}), want = got;
    std::string error;
    const auto plan =
        ConvertPlan::make(extents, src_strides, dst_strides, inner, total[0], total[1], error);
    ASSERT_TRUE(plan) << error;
    plan->run(got.data(), src.data());
    reference(extents, src_strides, dst_strides, inner, src, want);
    ASSERT_EQ(got, want) << "round " << round;
  }
}

TEST(ConvertPlan, EqualLayoutsBecomeOneCopy) {
  std::string error;
  const Sizes extents{2, 8, 4}, strides{512, 64, 16};
  const auto plan = ConvertPlan::make(extents, strides, strides, 16, 1024, 1024, error);
  ASSERT_TRUE(plan) << error;
  EXPECT_EQ(plan->dims(), 0u);
}

TEST(ConvertPlan, RefusesWhatWouldLeaveTheRegions) {
  std::string error;
  const Sizes extents{4, 4}, strides{64, 16};
  EXPECT_TRUE(ConvertPlan::make(extents, strides, strides, 16, 256, 256, error));
  EXPECT_FALSE(ConvertPlan::make(extents, strides, strides, 16, 255, 256, error));
  EXPECT_FALSE(ConvertPlan::make(extents, strides, strides, 16, 256, 255, error));
  EXPECT_NE(error.find("255"), std::string::npos);
  const Sizes huge{1ull << 40, 1ull << 40}, far{1ull << 40, 1ull << 60};
  EXPECT_FALSE(ConvertPlan::make(huge, far, far, 16, 256, 256, error));
  const Sizes zero{0, 4};
  EXPECT_FALSE(ConvertPlan::make(zero, strides, strides, 16, 256, 256, error));
}

TEST(ConvertPlan, RefusesDestinationsWrittenTwice) {
  std::string error;
  const Sizes extents{4, 4}, src{64, 16}, overlapping{32, 16};
  EXPECT_FALSE(ConvertPlan::make(extents, src, overlapping, 16, 256, 256, error));
  EXPECT_NE(error.find("twice"), std::string::npos);
  // The same strides are fine on the source: a broadcast reads a byte twice.
  EXPECT_TRUE(ConvertPlan::make(extents, overlapping, src, 16, 256, 256, error)) << error;
}

}  // namespace
}  // namespace ucm
