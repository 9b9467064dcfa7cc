// Packed objects in files, written and read through the Compress stage.
#include <gtest/gtest.h>

#include "compress_kit.h"

namespace ucm::compress_test {
namespace {

using namespace posix_test;

class PackedFiles : public ::testing::Test {
 protected:
  std::shared_ptr<Stage> compressed(const Geometry& geometry, PosixOptions o) {
    return make_compress_stage(make_posix_stage(geometry, std::move(o)), {});
  }
  PosixOptions options(const char* engine = "auto", bool direct = true) {
    PosixOptions o = options_for({dir.str()});
    o.engine = engine;
    o.direct = direct;
    return o;
  }
  static bool present(Stage& stage, const BlockId& id) {
    std::uint8_t found = 9;
    stage.lookup({&id, 1}, {&found, 1}, false);
    return found == 1;
  }

  const Geometry g = small_geometry(7, 32'768);
  const TempDir dir;
};

TEST_F(PackedFiles, TakeOnlyTheRoomTheyNeedAndComeBackByShard) {
  for (const char* engine : {"io_uring", "psync"}) {
    auto stage = compressed(g, options(engine, std::string(engine) != "psync"));
    const BlockId id = id_of(engine[0]);
    const Object from(g, 3);
    ASSERT_EQ(write(*stage, id, from).status, Status::kOk);
    EXPECT_TRUE(present(*stage, id));
    const auto bytes = fs::file_size(object_path(dir.path(), id));
    EXPECT_LT(bytes, g.object_bytes() * 3 / 4);
    EXPECT_EQ(bytes % kIoAlign, 0u);
    for (std::uint32_t begin = 0; begin < g.shard_count; ++begin) {
      for (std::uint32_t end = begin + 1; end <= g.shard_count; ++end) {
        Object into(g, 9, 0);
        const Object before(g, 9, 0);
        const auto was = stage->stats().at("read_packed_bytes_total");
        ASSERT_EQ(read(*stage, id, into, begin, end).status, Status::kOk);
        EXPECT_TRUE(into.equals(from, begin, end));
        EXPECT_TRUE(into.equals(before, 0, begin) && into.equals(before, end, g.shard_count));
        EXPECT_LT(stage->stats().at("read_packed_bytes_total") - was, bytes);
      }
    }
    EXPECT_EQ(stage->stats().at("read_corrupt_total"), 0u);
  }
}

TEST_F(PackedFiles, WithoutCompressTheyAreMissesThatStay) {
  const BlockId id = id_of(1);
  const Object from(g, 1);
  ASSERT_EQ(write(*compressed(g, options()), id, from).status, Status::kOk);
  auto plain = make_posix_stage(g, options());
  EXPECT_FALSE(present(*plain, id));
  Object into(g, 2, 0);
  EXPECT_EQ(read(*plain, id, into, 0, 2).status, Status::kMiss);
  EXPECT_TRUE(fs::exists(object_path(dir.path(), id)));
  // Dumped there it is replaced, and both can read it from then on.
  ASSERT_EQ(write(*plain, id, from).status, Status::kOk);
  EXPECT_TRUE(present(*plain, id));
  auto stage = compressed(g, options());
  EXPECT_TRUE(present(*stage, id));
  EXPECT_EQ(read(*stage, id, into, 0, g.shard_count).status, Status::kOk);
  EXPECT_TRUE(into.equals(from, 0, g.shard_count));
  ASSERT_EQ(write(*stage, id, from).status, Status::kOk);
  EXPECT_EQ(stage->stats().at("write_existing_total"), 1u);
}

TEST_F(PackedFiles, AreNotWrittenTwice) {
  auto stage = compressed(g, options());
  const Object from(g, 1);
  ASSERT_EQ(write(*stage, id_of(1), from).status, Status::kOk);
  ASSERT_EQ(write(*stage, id_of(1), from).status, Status::kOk);
  EXPECT_EQ(stage->stats().at("write_existing_total"), 1u);
}

TEST_F(PackedFiles, DamageAnywhereIsFoundAndRemoved) {
  auto stage = compressed(g, options());
  const BlockId id = id_of(1);
  const Object from(g, 1);
  Object into(g, 2, 0);
  ASSERT_EQ(write(*stage, id, from).status, Status::kOk);
  const auto file = object_path(dir.path(), id);
  const auto size = fs::file_size(file);
  // Fixed part, checksums, table of packed bytes, descriptor, first and last page of the data.
  const std::uint64_t table = 128 + 8 * g.shard_count;
  for (const std::uint64_t at : {std::uint64_t{20}, std::uint64_t{130}, table + 8,
                                 table + 8 * g.shard_count + 2, std::uint64_t{4100}, size - 8192}) {
    ASSERT_EQ(write(*stage, id, from).status, Status::kOk);
    flip_byte(file, at);
    EXPECT_EQ(read(*stage, id, into, 0, g.shard_count).status, Status::kCorrupt) << at;
    EXPECT_FALSE(fs::exists(file)) << at;
  }
  for (const std::uint64_t cut : {size - 1, size - 4096, std::uint64_t{4096}, std::uint64_t{100}}) {
    ASSERT_EQ(write(*stage, id, from).status, Status::kOk);
    fs::resize_file(file, cut);
    EXPECT_EQ(read(*stage, id, into, 0, g.shard_count).status, Status::kCorrupt) << cut;
    EXPECT_FALSE(fs::exists(file)) << cut;
  }
  ASSERT_EQ(write(*stage, id, from).status, Status::kOk);
  EXPECT_EQ(read(*stage, id, into, 0, g.shard_count).status, Status::kOk);
  EXPECT_TRUE(into.equals(from, 0, g.shard_count));
}

TEST_F(PackedFiles, AsLongAsAnObjectThatIsNotPacked) {
  // The table takes a page more, the one shard that shrinks a page less.
  const Geometry big = small_geometry(300, 8192);
  auto stage = compressed(big, options());
  const Object from(big, 1, 0);
  std::memset(from.data() + big.shard_offset(17), 1, big.shard_bytes);
  const BlockId id = id_of(1);
  ASSERT_EQ(write(*stage, id, from).status, Status::kOk);
  ASSERT_EQ(stage->stats().at("compress_plain_objects_total"), 0u);
  ASSERT_EQ(fs::file_size(object_path(dir.path(), id)), 4096 + big.object_bytes());
  Object into(big, 2, 0);
  EXPECT_TRUE(present(*stage, id));
  ASSERT_EQ(read(*stage, id, into, 0, big.shard_count).status, Status::kOk);
  EXPECT_TRUE(into.equals(from, 0, big.shard_count));
  ASSERT_EQ(read(*stage, id, into, 16, 19).status, Status::kOk);
  EXPECT_TRUE(into.equals(from, 16, 19));
}

TEST_F(PackedFiles, TooManyShardsAreRefusedAtSetUp) {
  EXPECT_THROW(compressed(small_geometry(1001, 4096), options()), CompressSetupError);
}

}  // namespace
}  // namespace ucm::compress_test
