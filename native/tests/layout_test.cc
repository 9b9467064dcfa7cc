// Descriptors and conversions against the definition, byte by byte.
#include "ucm/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <random>

#include "ucm/geometry.h"

namespace ucm {
namespace {

Layout parse(const std::string& text) {
  std::string error;
  auto layout = Layout::parse(text, error);
  EXPECT_TRUE(layout) << error;
  return *layout;
}

std::string refusal(const std::string& text) {
  std::string error;
  EXPECT_FALSE(Layout::parse(text, error)) << text;
  return error;
}

// One order of one object as plain data: what the text says, without the code under test.
struct Order {
  std::vector<LayoutAxis> outer;
  std::vector<LayoutAxis> inner[2];
  bool branched = false;

  [[nodiscard]] std::string text(const std::string& dtype) const {
    const auto list = [](const std::vector<LayoutAxis>& axes) {
      std::string out;
      for (const auto& a : axes) {
        if (!out.empty()) out += ',';
        out.append(kDimNames[static_cast<std::size_t>(a.dim)]);
        out.append(":").append(std::to_string(a.size)).append("@").append(std::to_string(a.step));
      }
      return out;
    };
    std::string out = dtype;
    out.append("|").append(list(outer));
    if (!branched) return out;
    if (!outer.empty()) out += ',';
    return out.append("kv(").append(list(inner[0])).append(";").append(list(inner[1])).append(")");
  }
};

using Where = std::array<std::uint64_t, 5>;

// Calls visit(logical position) for every element in the order of memory.
template <class Visit>
void walk(const std::vector<LayoutAxis>& axes, std::size_t at, Where where, const Visit& visit) {
  if (at == axes.size()) return visit(where);
  const LayoutAxis& a = axes[at];
  for (std::uint64_t i = 0; i < a.size; ++i) {
    Where next = where;
    next[static_cast<std::size_t>(a.dim)] += i * a.step;
    walk(axes, at + 1, next, visit);
  }
}

template <class Visit>
void walk(const Order& order, const Visit& visit) {
  walk(order.outer, 0, Where{}, [&](const Where& where) {
    if (!order.branched) return visit(where);
    for (std::uint64_t kv = 0; kv < 2; ++kv) {
      Where from = where;
      from[static_cast<std::size_t>(Dim::kKv)] = kv;
      walk(order.inner[kv], 0, from, visit);
    }
  });
}

// The stored object of `order` in which every element holds its own number; shards padded to `align`.
std::vector<std::byte> stored(const Order& order, const Layout& layout, std::uint64_t align) {
  std::map<Where, std::uint32_t> number;
  std::vector<Where> sequence;
  walk(order, [&](const Where& where) { sequence.push_back(where); });
  std::vector<Where> sorted = sequence;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(std::adjacent_find(sorted.begin(), sorted.end()), sorted.end());
  for (std::uint32_t i = 0; i < sorted.size(); ++i) number[sorted[i]] = i;
  std::vector<std::byte> out(layout.span_bytes(align), std::byte{0xEE});
  const std::uint64_t per_shard = sequence.size() / layout.shard_count();
  for (std::size_t i = 0; i < sequence.size(); ++i) {
    const std::uint64_t at =
        i / per_shard * align_up(layout.shard_bytes(), layout.shard_count() > 1 ? align : 1) +
        i % per_shard * 4;
    std::memcpy(&out[at], &number[sequence[i]], 4);
  }
  return out;
}

class Orders {
 public:
  explicit Orders(unsigned seed) : rng_(seed) {
    for (auto& size : sizes_) size = std::uint64_t{1} << (rng_() % 4);
    sizes_[static_cast<std::size_t>(Dim::kKv)] = 1 + rng_() % 2;
    elem_of_v_ = rng_() % 4 == 0 ? 2 : sizes_[static_cast<std::size_t>(Dim::kElem)];
    has_kv_ = sizes_[static_cast<std::size_t>(Dim::kKv)] == 2;
  }

  Order draw() {
    Order out;
    out.branched = has_kv_ && (rng_() % 2 == 0 || different_heads());
    std::vector<LayoutAxis> outer;
    for (std::size_t d = 0; d < sizes_.size(); ++d) {
      const auto dim = static_cast<Dim>(d);
      if (dim == Dim::kKv && out.branched) continue;
      const bool below = out.branched && (rng_() % 2 == 0 || dim == Dim::kElem);
      if (below) {
        split(dim, sizes_[d], out.inner[0]);
        split(dim, dim == Dim::kElem ? elem_of_v_ : sizes_[d], out.inner[1]);
      } else {
        split(dim, sizes_[d], out.outer);
      }
    }
    for (auto* axes : {&out.outer, &out.inner[0], &out.inner[1]}) {
      std::shuffle(axes->begin(), axes->end(), rng_);
    }
    if (rng_() % 3 == 0) {  // shards: layers outermost, as most engines have them
      std::stable_partition(out.outer.begin(), out.outer.end(),
                            [](const LayoutAxis& a) { return a.dim == Dim::kLayer; });
    }
    return out;
  }

 private:
  [[nodiscard]] bool different_heads() const {
    return has_kv_ && elem_of_v_ != sizes_[static_cast<std::size_t>(Dim::kElem)];
  }
  void split(Dim dim, std::uint64_t size, std::vector<LayoutAxis>& out) {
    for (std::uint64_t step = 1; step < size;) {
      const std::uint64_t width = rng_() % 3 != 0 ? size / step : 2;
      out.push_back({dim, width, step});
      step *= width;
    }
  }

  std::mt19937 rng_;
  std::array<std::uint64_t, 5> sizes_{};
  std::uint64_t elem_of_v_ = 1;
  bool has_kv_ = false;
};

TEST(Layout, RandomOrdersConvertAsDefined) {
  int straight = 0, branched = 0, sharded = 0;
  for (unsigned seed = 0; seed < 600; ++seed) {
    Orders orders(seed);
    const Order from = orders.draw(), to = orders.draw();
    const Layout source = parse(from.text("fp32")), target = parse(to.text("fp32"));
    const std::uint64_t align = seed % 2 == 0 ? 1 : 64;
    const auto bytes = stored(from, source, align);
    const auto want = stored(to, target, align);
    std::string why;
    const auto conversion = Conversion::plan(source, target, align, align, why);
    ASSERT_TRUE(conversion) << why;
    ASSERT_EQ(conversion->source_bytes(), bytes.size());
    ASSERT_EQ(conversion->target_bytes(), want.size());
    std::vector<std::byte> got(want.size(), std::byte{0xEE});
    conversion->run(got.data(), bytes.data(), 0, conversion->target_shards());
    ASSERT_EQ(got, want) << seed << ": " << source.text() << " -> " << target.text();
    straight += conversion->straight();
    branched += source.branched() != target.branched();
    sharded += target.shard_count() > 1;
    ASSERT_EQ(parse(source.text()), source);
  }
  EXPECT_GT(straight, 5);
  EXPECT_GT(branched, 50);
  EXPECT_GT(sharded, 50);
}

TEST(Layout, OneShardAtATimeTouchesNoOther) {
  const Layout source = parse("fp32|token:8,layer:4,head:2,elem:4");
  const Layout target = parse("fp32|layer:4,head:2,token:8,elem:4");
  std::string why;
  const auto conversion = Conversion::plan(source, target, 4096, 4096, why);
  ASSERT_TRUE(conversion) << why;
  std::vector<std::byte> bytes(conversion->source_bytes());
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 31 + 7);
  std::vector<std::byte> whole(conversion->target_bytes()), parts = whole;
  conversion->run(whole.data(), bytes.data(), 0, 4);
  for (const std::uint64_t shard : {2u, 0u, 3u, 1u}) {
    auto before = parts;
    conversion->run(parts.data(), bytes.data(), shard, shard + 1);
    std::memcpy(&before[shard * 4096], &parts[shard * 4096], 4096);
    ASSERT_EQ(parts, before);
  }
  EXPECT_EQ(parts, whole);
}

// The tiles of AMX: pairs of tokens or of elements beside each other, 16 lanes wide.
TEST(Layout, KernelTilesAreSplits) {
  const Layout rows = parse("bf16|kv:2,token:64,head:1,elem:32");
  const Layout tiles = parse(
      "bf16|token:2@32,kv(token:2@16,elem:16@2,token:16,elem:2;"
      "elem:2@16,token:16@2,elem:16,token:2)");
  std::string why;
  const auto conversion = Conversion::plan(rows, tiles, 1, 1, why);
  ASSERT_TRUE(conversion) << why;
  std::vector<std::uint16_t> values(2 * 64 * 32), got(values.size());
  std::iota(values.begin(), values.end(), std::uint16_t{0});
  conversion->run(reinterpret_cast<std::byte*>(got.data()),
                  reinterpret_cast<const std::byte*>(values.data()), 0, 1);
  // Token 37, element 11 of K: page 1, group 0, pair 5, lane 5, second of the pair.
  EXPECT_EQ(got[32 * 32 * 2 + 0 + (5 * 16 + 5) * 2 + 1], 37 * 32 + 11);
  // ... and of V: page 1 behind its K, element group 0, token pair 2, lane 11, second of the pair.
  EXPECT_EQ(got[32 * 32 * 2 + 32 * 32 + (2 * 16 + 11) * 2 + 1], 64 * 32 + 37 * 32 + 11);
}

TEST(Layout, EqualOrdersAreEqualTexts) {
  EXPECT_EQ(parse("bf16|layer:1,token:4@16,token:16,elem:8").text(), "bf16|token:64,elem:8");
  EXPECT_EQ(parse("fp32|head:2,kv(token:4,elem:8;token:4,elem:8)").text(),
            "fp32|head:2,kv:2,token:4,elem:8");
  EXPECT_EQ(parse("fp32|kv(token:1,elem:8;elem:8)").text(), "fp32|kv:2,elem:8");
  EXPECT_EQ(parse("fp32|layer:2,kv(elem:8,token:4;token:4,elem:8)").text(),
            "fp32|layer:2,kv(elem:8,token:4;token:4,elem:8)");
  EXPECT_NE(parse("bf16|token:4,elem:8"), parse("fp16|token:4,elem:8"));
}

TEST(Layout, WhatCannotBeConvertedSaysWhy) {
  const auto why_not = [](const std::string& a, const std::string& b) {
    std::string why;
    EXPECT_FALSE(Conversion::plan(parse(a), parse(b), 1, 1, why)) << a << " -> " << b;
    return why;
  };
  EXPECT_EQ(why_not("bf16|token:4,elem:8", "fp16|token:4,elem:8").find("elements differ"), 0u);
  EXPECT_NE(why_not("bf16|token:4,elem:8", "bf16|token:8,elem:8").find("4 of 'token'"),
            std::string::npos);
  EXPECT_NE(why_not("bf16|head:2,elem:8", "bf16|head:4,elem:4").find("'head'"), std::string::npos);
  EXPECT_NE(why_not("bf16|token:3@2,elem:8,token:2", "bf16|token:2@3,elem:8,token:3")
                .find("do not fit each other"),
            std::string::npos);
  EXPECT_NE(why_not("opaque.a|token:4,elem:8", "opaque.a|elem:8,token:4").find("no described"),
            std::string::npos);
  EXPECT_NE(why_not("opaque.a|elem:8", "opaque.b|elem:8").find("elements differ"),
            std::string::npos);
  EXPECT_NE(why_not("fp32|kv(elem:4;elem:8)", "fp32|kv(elem:8;elem:4)").find("'elem'"),
            std::string::npos);
}

TEST(Layout, BadTextIsRefusedWithTheReason) {
  for (const char* text : {"bf16",
                           "float|token:4",
                           "bf16|tokens:4",
                           "bf16|token:0",
                           "bf16|token:4@2",
                           "bf16|token:4,token:4",
                           "bf16|token:2@8,token:4",
                           "bf16|token:4 ",
                           "bf16|token:4,,elem:2",
                           "bf16|token:4,",
                           "opaque.|token:4",
                           "|token:4",
                           "bf16|token:+4",
                           "bf16|token:04",
                           "bf16|kv(elem:2)",
                           "bf16|kv(elem:2;elem:2),token:4",
                           "bf16|token:4kv(elem:2;elem:2)",
                           "bf16|,kv(elem:2;elem:2)",
                           "bf16|kv:2,kv(elem:2;elem:2)",
                           "bf16|kv(token:2;token:4)",
                           "bf16|kv(kv:2,elem:2;kv:2,elem:2)",
                           "bf16|elem:99999999999,token:99999999999",
                           "bf16|kv(elem:2;kv(elem:2;elem:2))",
                           "bf16|token:18446744073709551617"}) {
    EXPECT_EQ(refusal(text).find("layout '"), 0u) << text;
  }
  EXPECT_EQ(refusal(std::string(5000, 'x')).find("layout '"), 0u);
}

TEST(Layout, SizesAndShards) {
  const Layout packed = parse("fp32|layer:3,head:2,kv(elem:8,token:16;token:16,elem:8)");
  EXPECT_EQ(packed.total_bytes(), 3u * 2 * 2 * 8 * 16 * 4);
  EXPECT_EQ(packed.shard_count(), 3u);
  EXPECT_EQ(packed.shard_bytes(), 2u * 2 * 8 * 16 * 4);
  EXPECT_EQ(packed.span_bytes(4096), 3u * 4096);
  EXPECT_EQ(packed.total(Dim::kKv), 2u);
  EXPECT_EQ(packed.total(Dim::kElem, 1), 8u);
  EXPECT_EQ(parse("bf16|layer:2@2,token:4,layer:2").shard_count(), 1u);
  EXPECT_EQ(parse("fp32|kv(layer:2,elem:8;layer:2,elem:8)").shard_count(), 1u);
  EXPECT_EQ(parse("opaque.mamba2|layer:3,elem:100").total_bytes(), 300u);
  EXPECT_EQ(parse("bf16|").total_bytes(), 2u);
}

}  // namespace
}  // namespace ucm
