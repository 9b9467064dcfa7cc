// Objects in another layout: read whole once, verified, converted; or a miss that stays.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "posix_kit.h"
#include "ucm/layout.h"

namespace ucm {
namespace {

using namespace posix_test;

// 4 layers, 32 tokens, 2 heads of 16.
constexpr const char* kPacked =
    "fp32|layer:4,token:2@16,head:2,kv(elem:16,token:16;token:16,elem:16)";
constexpr const char* kWide = "fp32|layer:4,head:2,kv(elem:16,token:32;token:32,elem:16)";
constexpr const char* kPageFirst = "fp32|kv:2,token:32,layer:4,head:2,elem:16";
constexpr const char* kRows = "fp32|layer:4,token:32,head:2,kv:2,elem:16";

Layout parse(const std::string& text) {
  std::string error;
  auto layout = Layout::parse(text, error);
  EXPECT_TRUE(layout) << error;
  return *layout;
}

Geometry geometry_of(const std::string& text) {
  const Layout layout = parse(text);
  Geometry g;
  g.shard_count = static_cast<std::uint32_t>(layout.shard_count());
  g.shard_bytes = layout.shard_bytes();
  g.runs = {{g.shard_bytes, 1, 0}};
  g.layout = layout.text();
  return g;
}

// What a reader of layout `to` must see of the object that a writer of layout `from` stored.
std::vector<std::byte> expected(const std::string& from, const std::string& to, const BlockId& id) {
  std::string why;
  const auto conversion = Conversion::plan(parse(from), parse(to), kIoAlign, kIoAlign, why);
  EXPECT_TRUE(conversion) << why;
  const Region stored(geometry_of(from), id);
  std::vector<std::byte> out(geometry_of(to).object_bytes());
  conversion->run(out.data(), stored.data(), 0, conversion->target_shards());
  return out;
}

bool same(const Geometry& g, const std::byte* got, const std::vector<std::byte>& want,
          std::uint32_t begin, std::uint32_t end) {
  for (std::uint32_t i = begin; i < end; ++i) {
    if (std::memcmp(got + g.shard_offset(i), &want[g.shard_offset(i)], g.shard_bytes) != 0)
      return false;
  }
  return true;
}

class Convert : public ::testing::TestWithParam<const char*> {
 protected:
  PosixOptions options(std::shared_ptr<IoFaults> faults = nullptr) {
    auto o = options_for({dir.str()});
    o.engine = GetParam();
    o.faults = std::move(faults);
    return o;
  }
  void store(const std::string& layout, int count) {
    Harness writer(geometry_of(layout), options());
    for (int i = 0; i < count; ++i) ASSERT_EQ(writer.write(id_of(i)).status, Status::kOk);
  }
  fs::path file(int i) { return object_path(dir.path(), id_of(i)); }

  const TempDir dir;
};

TEST_P(Convert, EachReaderSeesItsOwnOrder) {
  const std::vector<std::string> all = {kPacked, kWide, kPageFirst, kRows};
  for (const auto& from : all) {
    const TempDir own;
    auto o = options_for({own.str()});
    o.engine = GetParam();
    {
      Harness writer(geometry_of(from), o);
      for (int i = 0; i < 3; ++i) ASSERT_EQ(writer.write(id_of(i)).status, Status::kOk);
    }
    for (const auto& to : all) {
      Harness h(geometry_of(to), o);
      for (int i = 0; i < 3; ++i) {
        ASSERT_TRUE(h.present(id_of(i)));
        Region into(h.geometry);
        ASSERT_EQ(h.read(id_of(i), into).status, Status::kOk);
        EXPECT_TRUE(
            same(h.geometry, into.data(), expected(from, to, id_of(i)), 0, h.geometry.shard_count))
            << from << " -> " << to;
        // The control: the stored bytes as they are would be wrong.
        EXPECT_EQ(into.holds(id_of(i)), from == to);
      }
      EXPECT_EQ(h.stat("convert_reads_total"), from == to ? 0u : 3u);
      // A dump of what is stored in another order stores nothing.
      EXPECT_EQ(h.write(id_of(0)).status, Status::kOk);
      EXPECT_EQ(h.stat("write_existing_total"), 1u);
    }
    Harness writer(geometry_of(from), o);
    EXPECT_EQ(writer.read(id_of(0)).status, Status::kOk) << "the writer's file is as it was";
  }
}

TEST_P(Convert, ShardsAskedForOneByOneCostOneRead) {
  store(kPageFirst, 1);
  Harness h(geometry_of(kPacked), options());
  const auto want = expected(kPageFirst, kPacked, id_of(0));
  const Geometry& g = h.geometry;
  Region into(g, id_of(77));
  const Region before(g, id_of(77));
  const auto ask = [&](std::vector<std::uint32_t> shards) {
    std::vector<ReadOp> ops;
    for (const auto s : shards) ops.push_back({id_of(0), into.data(), s, s + 1, ops.size()});
    const auto results = std::make_shared<Results>(ops.size());
    h.stage->read(ops, results, in(milliseconds(20'000)));
    ASSERT_TRUE(results->wait());
    EXPECT_EQ(results->count(Status::kOk), ops.size());
  };
  ask({3, 1});
  EXPECT_TRUE(same(g, into.data(), want, 1, 2));
  EXPECT_TRUE(same(g, into.data(), want, 3, 4));
  EXPECT_EQ(h.stat("convert_reads_total"), 1u);
  ask({0});  // a later operation finds the object still there
  ask({2});
  EXPECT_TRUE(same(g, into.data(), want, 0, 4));
  EXPECT_EQ(h.stat("convert_reads_total"), 1u);
  EXPECT_EQ(h.stat("read_converted_total"), 4u);
}

TEST_P(Convert, OtherSizesOfHeaderAndPaddingAreFound) {
  // 512 bytes a layer: three padded shards in one order, a single one in the other.
  const std::string layers = "fp32|layer:3,token:8,kv:2,elem:8";
  const std::string whole = "fp32|token:8,layer:3,kv:2,elem:8";
  store(layers, 2);
  Harness h(geometry_of(whole), options());
  ASSERT_NE(fs::file_size(file(0)), 4096 + h.geometry.object_bytes());
  EXPECT_TRUE(h.present(id_of(0)));
  EXPECT_TRUE(h.present(id_of(1)));
  EXPECT_FALSE(h.present(id_of(2)));
  for (int i = 0; i < 2; ++i) {
    Region into(h.geometry);
    ASSERT_EQ(h.read(id_of(i), into).status, Status::kOk);
    EXPECT_TRUE(same(h.geometry, into.data(), expected(layers, whole, id_of(i)), 0, 1));
  }
  EXPECT_EQ(h.write(id_of(1)).status, Status::kOk);
  EXPECT_EQ(h.stat("write_existing_total"), 1u);
}

TEST_P(Convert, WhatCannotBeConvertedIsAMissThatStays) {
  const std::vector<std::string> foreign = {
      "bf16|layer:4,token:32,head:2,kv:2,elem:32",  // other elements in as many bytes
      "fp32|layer:4,token:32,head:4,kv:2,elem:8",   // other heads
      "fp32|layer:4,token:16,head:2,kv:2,elem:32",  // other tokens
      "opaque.x|layer:4,elem:8192",                 // nobody said in which order
      "fp32|layer:4,head:2,kv(elem:16,token:32;token:32,elem:16),",  // no descriptor
  };
  for (std::size_t i = 0; i < foreign.size(); ++i) {
    Geometry g = geometry_of(kPacked);
    g.layout = foreign[i];
    Harness writer(g, options());
    ASSERT_EQ(writer.write(id_of(i)).status, Status::kOk);
    Harness h(geometry_of(kPacked), options());
    Region into(h.geometry, id_of(500));
    EXPECT_EQ(h.read(id_of(i), into).status, Status::kMiss) << foreign[i];
    EXPECT_EQ(h.stat("read_foreign_total"), 1u);
    EXPECT_EQ(h.stat("read_converted_total"), 0u);
    EXPECT_EQ(writer.read(id_of(i)).status, Status::kOk) << "left alone";
    EXPECT_EQ(h.write(id_of(i)).status, Status::kOk);
    EXPECT_EQ(h.stat("write_replaced_total"), 1u);
    EXPECT_EQ(h.read(id_of(i)).status, Status::kOk);
  }
}

TEST_P(Convert, DamageIsNeverConverted) {
  const std::vector<std::uint64_t> places = {128 + 3,       // checksum table
                                             4096 + 5,      // first bytes
                                             4096 + 20000,  // another layer's part of the page
                                             4096 + 32767};
  for (const std::uint64_t at : places) {
    store(kPageFirst, 1);
    flip_byte(file(0), at);
    Harness h(geometry_of(kPacked), options());
    const Geometry& g = h.geometry;
    // Only shard 2 is asked for; the damage may be in bytes that do not even go there.
    const auto results = std::make_shared<Results>(2);
    Region into(g);
    const std::vector<ReadOp> ops = {{id_of(0), into.data(), 2, 3, 0},
                                     {id_of(0), into.data(), 0, 1, 1}};
    h.stage->read(ops, results, in(milliseconds(20'000)));
    ASSERT_TRUE(results->wait());
    EXPECT_NE(results->at(0).status, Status::kOk) << at;
    EXPECT_NE(results->at(1).status, Status::kOk) << at;
    EXPECT_EQ(h.stat("read_converted_total"), 0u);
    EXPECT_FALSE(fs::exists(file(0))) << "removed, so that the next dump heals it";
    EXPECT_EQ(h.stat("corrupt_removed_total"), 1u);
  }
}

TEST_P(Convert, AFailedReadFailsAllWhoWaitForIt) {
  store(kPageFirst, 1);
  std::atomic<bool> fail{true};
  std::atomic<int> reads{0};
  Harness h(geometry_of(kPacked),
            options(std::make_shared<Faults>([&](IoStep step, const std::string&, std::size_t& n) {
              if (step != IoStep::kRead || n < 32768 || !fail) return 0;
              ++reads;
              return -EIO;
            })));
  Region into(h.geometry);
  const auto results = std::make_shared<Results>(4);
  std::vector<ReadOp> ops;
  for (std::uint32_t s = 0; s < 4; ++s) ops.push_back({id_of(0), into.data(), s, s + 1, s});
  h.stage->read(ops, results, in(milliseconds(20'000)));
  ASSERT_TRUE(results->wait());
  EXPECT_EQ(results->count(Status::kIoError), 4u);
  EXPECT_EQ(results->at(0).error, EIO);
  EXPECT_GE(reads, 1);
  fail = false;
  ASSERT_EQ(h.read(id_of(0), into).status, Status::kOk);
  EXPECT_TRUE(same(h.geometry, into.data(), expected(kPageFirst, kPacked, id_of(0)), 0, 4));
}

TEST_P(Convert, ShortReadsAndAReplacedFile) {
  store(kPageFirst, 1);
  Harness h(geometry_of(kPacked),
            options(std::make_shared<Faults>([&](IoStep step, const std::string&, std::size_t& n) {
              if (step == IoStep::kRead) n = std::min<std::size_t>(n, 8192);
              return 0;
            })));
  Region into(h.geometry);
  ASSERT_EQ(h.read(id_of(0), into).status, Status::kOk);
  EXPECT_TRUE(same(h.geometry, into.data(), expected(kPageFirst, kPacked, id_of(0)), 0, 4));
  // Another file under the same name: what was read before is not served for it.
  fs::remove(file(0));
  store(kRows, 1);
  ASSERT_EQ(h.read(id_of(0), into).status, Status::kOk);
  EXPECT_TRUE(same(h.geometry, into.data(), expected(kRows, kPacked, id_of(0)), 0, 4));
  EXPECT_EQ(h.stat("convert_reads_total"), 2u);
}

// Far more objects at once than there are buffers, of three layouts, from several threads.
TEST_P(Convert, AMixedCrowdIsServedFromFewBuffers) {
  constexpr int kObjects = 90;
  const std::string from[] = {kPageFirst, kPacked, kWide};
  for (int i = 0; i < kObjects; ++i) {
    Harness writer(geometry_of(from[i % 3]), options());
    ASSERT_EQ(writer.write(id_of(i)).status, Status::kOk);
  }
  Harness h(geometry_of(kPacked), options());
  std::atomic<int> wrong{0};
  const auto load = [&](int thread) {
    const auto results = std::make_shared<Results>(kObjects * 2);
    std::vector<std::unique_ptr<Region>> into;
    std::vector<ReadOp> ops;
    for (int i = 0; i < kObjects; ++i) {
      const int n = (i * 7 + thread * 31) % kObjects;
      into.push_back(std::make_unique<Region>(h.geometry));
      ops.push_back({id_of(n), into.back()->data(), 0, 1, ops.size(), i % 5 != 0});
      ops.push_back({id_of(n), into.back()->data(), 1, 4, ops.size(), i % 5 != 0});
    }
    h.stage->read(ops, results, in(milliseconds(30'000)));
    if (!results->wait(milliseconds(30'000)) || results->count(Status::kOk) != ops.size()) ++wrong;
    for (int i = 0; i < kObjects; ++i) {
      const int n = (i * 7 + thread * 31) % kObjects;
      const auto want = expected(from[n % 3], kPacked, id_of(n));
      if (!same(h.geometry, into[static_cast<std::size_t>(i)]->data(), want, 0, 4)) ++wrong;
    }
  };
  std::thread threads[] = {std::thread(load, 0), std::thread(load, 1), std::thread(load, 2)};
  for (auto& t : threads) t.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(h.stat("read_converted_total"), 3u * 2 * 60);
}

INSTANTIATE_TEST_SUITE_P(Engines, Convert, ::testing::Values("auto", "psync"));

TEST(ConvertHung, TheRestIsServedFromOtherBuffers) {
  const TempDir dir;
  auto o = options_for({dir.str()});
  o.engine = "psync";  // the plan below hangs a thread, and what it alone has in flight
  {
    Harness writer(geometry_of(kPageFirst), o);
    for (int i = 0; i < 4; ++i) ASSERT_EQ(writer.write(id_of(i)).status, Status::kOk);
  }
  std::atomic<bool> hang{true};
  o.faults = std::make_shared<Faults>([&](IoStep step, const std::string& path, std::size_t& n) {
    while (step == IoStep::kRead && n == 32768 && hang &&
           path == object_path("", id_of(0)).lexically_relative("ns-test").string()) {
      std::this_thread::sleep_for(milliseconds(5));
    }
    return 0;
  });
  o.stall = milliseconds(100);
  Harness h(geometry_of(kPacked), o);
  Region into(h.geometry), stuck(h.geometry);
  const auto results = std::make_shared<Results>(1);
  const std::vector<ReadOp> ops = {{id_of(0), stuck.data(), 0, 4, 0}};
  h.stage->read(ops, results, in(milliseconds(300)));
  for (int i = 1; i < 4; ++i) {
    ASSERT_EQ(h.read(id_of(i), into).status, Status::kOk);
    EXPECT_TRUE(same(h.geometry, into.data(), expected(kPageFirst, kPacked, id_of(i)), 0, 4));
  }
  hang = false;
  EXPECT_TRUE(results->wait());
}

}  // namespace
}  // namespace ucm
