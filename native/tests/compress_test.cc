// Packing and unpacking, and the Compress stage over an in-memory medium.
#include <gtest/gtest.h>

#include "compress/packer.h"
#include "compress/planes.h"
#include "compress_kit.h"
#include "ucm/empty_stage.h"
#include "ucm/fake_stage.h"

namespace ucm::compress_test {
namespace {

using compress::Packer;
using compress::Unpacked;
using posix_test::eventually;
using posix_test::id_of;
using posix_test::in;
using posix_test::milliseconds;
using posix_test::Results;
using posix_test::small_geometry;

TEST(Planes, SplitsAndJoinsEveryWidth) {
  for (const std::size_t width : {1u, 2u, 4u, 8u}) {
    for (const std::size_t bytes : {0u, 1u, 7u, 8u, 64u, 1001u, 4096u}) {
      std::vector<std::byte> data(bytes);
      fill(data.data(), bytes, Content::kNoise, bytes + width);
      std::vector<std::byte> planes(bytes);
      compress::split_planes(data.data(), bytes, width, planes.data());
      std::array<const std::byte*, 8> starts{};
      const std::byte* at = planes.data();
      for (std::size_t p = 0; p < width; ++p) {
        starts[p] = at;
        if (bytes / width > 1) {
          EXPECT_EQ(at[1], data[width + p]);
        }
        at += compress::plane_bytes(bytes, width, p);
      }
      EXPECT_EQ(at, planes.data() + bytes);
      std::vector<std::byte> back(bytes);
      compress::join_planes(starts.data(), bytes, width, back.data());
      EXPECT_EQ(back, data) << width << " x " << bytes;
    }
  }
}

struct Packed {
  std::vector<std::byte> place;  ///< as long as the shard
  std::uint64_t bytes;
};

Packed packed(Packer& packer, const std::vector<std::byte>& shard) {
  Packed out{std::vector<std::byte>(shard.size()), 0};
  out.bytes = packer.pack(shard.data(), out.place.data());
  return out;
}

TEST(Packer, GivesBackEveryBitOfEverySize) {
  for (const CodecKind codec : {CodecKind::kZstd, CodecKind::kLz4}) {
    for (const std::size_t bytes : {8192u, 8193u, 262'144u, 300'001u, 1'100'000u}) {
      for (const std::uint32_t width : {1u, 2u, 4u, 8u}) {
        Packer packer(bytes, bytes - 1, codec, 1, width);
        std::vector<std::byte> shard(bytes);
        fill(shard.data(), bytes, Content::kZeros, 3);
        fill(shard.data() + bytes / 2, bytes / 2, Content::kBf16, bytes);
        Packed p = packed(packer, shard);
        ASSERT_GT(p.bytes, 0u);
        ASSERT_LT(p.bytes, bytes);
        ASSERT_EQ(packer.unpack(p.place.data(), p.bytes), Unpacked::kOk);
        ASSERT_EQ(p.place, shard) << bytes << " bytes, width " << width;
      }
    }
  }
}

TEST(Packer, PlanesMakeBf16SmallerThanBytesAsTheyLie) {
  constexpr std::size_t kBytes = 512u << 10;
  std::vector<std::byte> shard(kBytes);
  fill(shard.data(), kBytes, Content::kBf16, 1);
  Packer by_plane(kBytes, kBytes - 1, CodecKind::kZstd, 1, 2);
  Packer as_is(kBytes, kBytes - 1, CodecKind::kZstd, 1, 1);
  const std::uint64_t planes = packed(by_plane, shard).bytes;
  const std::uint64_t flat = packed(as_is, shard).bytes;
  ASSERT_GT(planes, 0u);
  EXPECT_LT(planes, kBytes * 8 / 10);  // a byte of seven mantissa bits, and one of about three
  EXPECT_TRUE(flat == 0 || planes < flat);
}

TEST(Packer, NoiseIsNotWorthIt) {
  for (const CodecKind codec : {CodecKind::kZstd, CodecKind::kLz4, CodecKind::kNone}) {
    std::vector<std::byte> shard(1 << 20);
    fill(shard.data(), shard.size(), Content::kNoise, 9);
    Packer packer(shard.size(), shard.size() - kIoAlign, codec, 1, 2);
    EXPECT_EQ(packed(packer, shard).bytes, 0u);
  }
}

TEST(Packer, NeverExceedsItsLimit) {
  std::vector<std::byte> shard(64 << 10);
  fill(shard.data(), shard.size(), Content::kBf16, 4);
  for (std::uint64_t limit = 0; limit < shard.size(); limit += 1999) {
    Packer packer(shard.size(), limit, CodecKind::kZstd, 1, 2);
    std::vector<std::byte> to(limit + 64, std::byte{0xEE});
    EXPECT_LE(packer.pack(shard.data(), to.data()), limit);
    for (std::size_t i = limit; i < to.size(); ++i) ASSERT_EQ(to[i], std::byte{0xEE});
  }
}

TEST(Packer, DamageIsNeverTakenForAShard) {
  constexpr std::size_t kBytes = 300'000;
  for (const CodecKind codec : {CodecKind::kZstd, CodecKind::kLz4}) {
    std::vector<std::byte> shard(kBytes);
    fill(shard.data(), kBytes, Content::kBf16, 2);
    std::memset(shard.data(), 0, kBytes / 3);
    Packer packer(kBytes, kBytes - 1, codec, 1, 2);
    const Packed good = packed(packer, shard);
    ASSERT_GT(good.bytes, 0u);
    std::mt19937_64 rng(17);
    for (int round = 0; round < 300; ++round) {
      Packed bad = good;
      const std::size_t at = round < 100 ? rng() % 64 : rng() % good.bytes;  // headers, then all
      bad.place[at] ^= static_cast<std::byte>(1u << (rng() % 8));
      if (round % 10 == 9) bad.bytes = rng() % good.bytes;
      if (packer.unpack(bad.place.data(), bad.bytes) == Unpacked::kOk) {
        EXPECT_EQ(bad.place, shard) << "byte " << at;  // bits that mean nothing
      }
    }
  }
}

TEST(Packer, OtherVersionsAndSizesAreLeftAlone) {
  std::vector<std::byte> shard(64 << 10);
  fill(shard.data(), shard.size(), Content::kZeros, 1);
  Packer packer(shard.size(), shard.size() - 1, CodecKind::kZstd, 1, 2);
  Packed p = packed(packer, shard);
  p.place[4] = std::byte{9};
  EXPECT_EQ(packer.unpack(p.place.data(), p.bytes), Unpacked::kUnknown);
  p = packed(packer, shard);
  Packer other(shard.size() * 2, shard.size() * 2 - 1, CodecKind::kZstd, 1, 2);
  EXPECT_EQ(other.unpack(p.place.data(), p.bytes), Unpacked::kUnknown);
}

// ---- the stage ----

class CompressStage : public ::testing::Test {
 protected:
  void open(CompressOptions o, std::uint32_t shards = 7, std::uint64_t bytes = 32'768) {
    g = small_geometry(shards, bytes);
    medium = std::make_shared<FakeMedium>();
    fake = std::make_shared<FakeStage>(g, medium, FakeOptions{});
    stage = make_compress_stage(fake, o);
  }
  std::uint64_t stat(const std::string& name) { return stage->stats().at(name); }

  Geometry g;
  std::shared_ptr<FakeMedium> medium;
  std::shared_ptr<FakeStage> fake;
  std::shared_ptr<Stage> stage;
};

TEST_F(CompressStage, ReadsBackAnyRangeOfWhatItWrote) {
  open({});
  const Object from(g, 1);
  ASSERT_EQ(write(*stage, id_of(1), from).status, Status::kOk);
  EXPECT_EQ(stat("compress_plain_shards_total"), 3u);  // noise: shards 0, 3, 6
  EXPECT_LT(stat("compress_out_bytes_total"), stat("compress_in_bytes_total"));
  for (std::uint32_t begin = 0; begin < g.shard_count; ++begin) {
    for (std::uint32_t end = begin + 1; end <= g.shard_count; ++end) {
      Object into(g, 99, 0);
      const Object before(g, 99, 0);
      ASSERT_EQ(read(*stage, id_of(1), into, begin, end).status, Status::kOk);
      EXPECT_TRUE(into.equals(from, begin, end));
      EXPECT_TRUE(into.equals(before, 0, begin) && into.equals(before, end, g.shard_count));
    }
  }
}

TEST_F(CompressStage, ManyAtOnceFromManyThreads) {
  CompressOptions o;
  o.threads = 3;
  o.buffer_bytes = 0;  // two buffers for forty objects
  open(o, 5, 12'288);
  std::vector<std::unique_ptr<Object>> objects;
  std::vector<WriteOp> ops;
  for (std::uint64_t n = 0; n < 40; ++n) {
    objects.push_back(std::make_unique<Object>(g, n));
    ops.push_back({id_of(n), objects.back()->data(), n, nullptr});
  }
  auto written = std::make_shared<Results>(40);
  stage->write(ops, written, in(milliseconds(20'000)));
  ASSERT_TRUE(written->wait());
  ASSERT_EQ(written->count(Status::kOk), 40u);
  EXPECT_LE(stat("compress_buffers"), 2u);
  std::vector<std::thread> readers;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    readers.emplace_back([&, t] {
      for (std::uint64_t n = static_cast<std::uint64_t>(t); n < 40; n += 4) {
        Object into(g, 500, 0);
        if (read(*stage, id_of(n), into, 0, g.shard_count).status != Status::kOk ||
            !into.equals(*objects[n], 0, g.shard_count)) {
          ++wrong;
        }
      }
    });
  }
  for (auto& r : readers) r.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(CompressStage, WhatDoesNotShrinkIsStoredAsWithoutIt) {
  open({});
  const Object from(g, 1, 0);
  ASSERT_EQ(write(*stage, id_of(1), from).status, Status::kOk);
  EXPECT_EQ(stat("compress_plain_objects_total"), 1u);
  Object into(g, 2, 0);
  EXPECT_EQ(read(*fake, id_of(1), into, 0, g.shard_count).status, Status::kOk);
  EXPECT_TRUE(into.equals(from, 0, g.shard_count));
}

TEST_F(CompressStage, CodecNoneStillReadsWhatWasPacked) {
  open({});
  const Object from(g, 1);
  ASSERT_EQ(write(*stage, id_of(1), from).status, Status::kOk);
  CompressOptions none;
  none.codec = CodecKind::kNone;
  auto other = make_compress_stage(std::make_shared<FakeStage>(g, medium, FakeOptions{}), none);
  Object into(g, 2, 0);
  EXPECT_EQ(read(*other, id_of(1), into, 0, g.shard_count).status, Status::kOk);
  EXPECT_TRUE(into.equals(from, 0, g.shard_count));
  ASSERT_EQ(write(*other, id_of(2), from).status, Status::kOk);
  EXPECT_EQ(other->stats().at("compress_plain_objects_total"), 1u);
}

TEST_F(CompressStage, WithoutItPackedObjectsAreMisses) {
  open({});
  ASSERT_EQ(write(*stage, id_of(1), Object(g, 1)).status, Status::kOk);
  Object into(g, 2, 0);
  EXPECT_EQ(read(*fake, id_of(1), into, 0, 1).status, Status::kMiss);
}

TEST_F(CompressStage, FailuresBelowArePassedOn) {
  open({});
  Object into(g, 2, 0);
  EXPECT_EQ(read(*stage, id_of(5), into, 0, g.shard_count).status, Status::kMiss);
  fake->inject(id_of(1), false, Fault::kIoError, ENOSPC, 1);
  const Outcome o = write(*stage, id_of(1), Object(g, 1));
  EXPECT_EQ(o.status, Status::kIoError);
  EXPECT_EQ(o.error, ENOSPC);
  ASSERT_EQ(write(*stage, id_of(1), Object(g, 1)).status, Status::kOk);
  fake->inject(id_of(1), true, Fault::kCorrupt, 0, 1);
  EXPECT_EQ(read(*stage, id_of(1), into, 0, g.shard_count).status, Status::kCorrupt);
}

TEST_F(CompressStage, AHungMediumHoldsItsBuffersAndNothingElse) {
  CompressOptions o;
  o.buffer_bytes = 0;
  open(o);
  fake->set_fault(Fault::kHang, 0);
  const Object from(g, 1);
  std::vector<WriteOp> ops;
  for (std::uint64_t n = 0; n < 5; ++n) ops.push_back({id_of(n), from.data(), n, nullptr});
  auto results = std::make_shared<Results>(5);
  stage->write(ops, results, in(milliseconds(300)));
  // Two are below for ever; three wait for a buffer until their time is over.
  EXPECT_TRUE(eventually([&] { return results->count(Status::kTimeout) == 3; }));
  EXPECT_EQ(stat("compress_buffers_in_use"), 2u);
  EXPECT_EQ(fake->hung(), 2u);
  // Reads are not held up by writes.
  fake->set_fault(Fault::kNone, 0);
  Object into(g, 2, 0);
  EXPECT_EQ(read(*stage, id_of(9), into, 0, 1).status, Status::kMiss);

  const auto began = Clock::now();
  stage->shutdown(in(milliseconds(200)));
  EXPECT_LT(Clock::now() - began, milliseconds(1500));
  EXPECT_EQ(stat("compress_stuck_threads"), 0u);
  EXPECT_EQ(stat("compress_buffers_in_use"), 2u) << "what is in flight keeps its buffer";
  fake->release_hung(true);
  ASSERT_TRUE(results->wait());
  EXPECT_EQ(stat("compress_buffers_in_use"), 0u);
}

TEST_F(CompressStage, LateReadsEndAfterTheShutdown) {
  open({});
  const Object from(g, 1);
  ASSERT_EQ(write(*stage, id_of(1), from).status, Status::kOk);
  fake->set_fault(Fault::kHang, 0);
  Object into(g, 2, 0);
  auto shards = std::make_shared<Shards>(g.shard_count);
  const ReadOp op{id_of(1), into.data(), 0, g.shard_count, 0, true, nullptr};
  stage->read({&op, 1}, shards, in(milliseconds(100)));
  ASSERT_TRUE(eventually([&] { return fake->hung() == 1; }));
  stage->shutdown(in(milliseconds(100)));
  EXPECT_EQ(shards->told(), 0u) << "the medium may still write: nobody is told";
  fake->release_hung(true);
  ASSERT_TRUE(shards->wait(g.shard_count));
  EXPECT_EQ(shards->at(0).status, Status::kOk);      // came as it is
  EXPECT_EQ(shards->at(1).status, Status::kClosed);  // nobody is left to unpack it
  auto late = std::make_shared<Shards>(g.shard_count);
  stage->read({&op, 1}, late, in(milliseconds(100)));
  ASSERT_TRUE(late->wait(g.shard_count));
  EXPECT_EQ(late->at(0).status, Status::kClosed);
}

TEST_F(CompressStage, SteadyWorkTakesNoMoreMemory) {
  CompressOptions o;
  o.threads = 1;
  open(o);
  const Object from(g, 1);
  Object into(g, 2, 0);
  for (std::uint64_t n = 0; n < 50; ++n) {
    ASSERT_EQ(write(*stage, id_of(n), from).status, Status::kOk);
    ASSERT_EQ(read(*stage, id_of(n), into, 0, g.shard_count).status, Status::kOk);
  }
  EXPECT_EQ(stat("compress_buffers"), 1u);
}

TEST(CompressSetup, RefusesWhatDoesNotFit) {
  const Geometry g = small_geometry(4, 8192);
  const auto message = [](const std::shared_ptr<Stage>& below, CompressOptions o) {
    try {
      (void)make_compress_stage(below, o);
    } catch (const CompressSetupError& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_NE(message(std::make_shared<EmptyStage>(g), {}).find("does not keep objects"),
            std::string::npos);
  const auto fake = std::make_shared<FakeStage>(g, std::make_shared<FakeMedium>(), FakeOptions{});
  CompressOptions o;
  o.element_bytes = 3;
  EXPECT_NE(message(fake, o).find("1, 2, 4 or 8, got 3"), std::string::npos);
  o = {};
  o.level = 20;
  EXPECT_NE(message(fake, o).find("got 20"), std::string::npos);
}

}  // namespace
}  // namespace ucm::compress_test
