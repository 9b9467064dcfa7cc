// Damage on the medium: never delivered, freed, counted, healed by the next dump.
#include <gtest/gtest.h>

#include "slab_kit.h"

namespace ucm {
namespace {

using namespace slab_test;

void overwrite(const fs::path& file, std::uint64_t at, const std::vector<std::byte>& bytes) {
  const int fd = ::open(file.c_str(), O_RDWR);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(at)),
            static_cast<ssize_t>(bytes.size()));
  fsync(fd);
  ::close(fd);
}

class SlabDamage : public ::testing::Test {
 protected:
  void damaged(std::uint64_t in_slot) {
    Harness h(o);
    ASSERT_EQ(write_range(h, 0, 4), 4u);
    const Place place = place_of(dir.path(), id_of(1));
    ASSERT_TRUE(place.found);
    flip_byte(place.file, place.slot + in_slot);
    EXPECT_EQ(h.read(id_of(1)).status, Status::kCorrupt) << in_slot;
    EXPECT_EQ(h.stat("read_corrupt_total"), 1u);
    EXPECT_EQ(h.stat("corrupt_removed_total"), 1u);
    EXPECT_FALSE(h.present(id_of(1)));
    EXPECT_EQ(h.read(id_of(1)).status, Status::kMiss);
    EXPECT_TRUE(eventually([&] { return !place_of(dir.path(), id_of(1)).found; }))
        << "the medium is told too";
    EXPECT_EQ(load_range(h, 0, 4), 3) << "the neighbours are untouched";
    EXPECT_EQ(h.write(id_of(1)).status, Status::kOk);
    EXPECT_EQ(load_range(h, 0, 4), 4);
    const BlockId all[] = {id_of(0), id_of(1), id_of(2), id_of(3)};
    h.stage->remove(all);
  }
  const TempDir dir;
  const PosixOptions o = slab_options({dir.str()});
};

TEST_F(SlabDamage, OfAnyByteThatMatters) {
  damaged(3);                    // magic is 8 bytes: an unknown header
  damaged(20);                   // fixed part
  damaged(130);                  // checksum table
  damaged(4096 + 5);             // first shard
  damaged(4096 + 3 * 8192 + 1);  // last shard
}

TEST_F(SlabDamage, ASlotThatSomebodyEmptiedIsAMiss) {
  Harness h(o);
  ASSERT_EQ(h.write(id_of(1)).status, Status::kOk);
  const Place place = place_of(dir.path(), id_of(1));
  overwrite(place.file, place.slot, std::vector<std::byte>(4096));
  EXPECT_EQ(h.read(id_of(1)).status, Status::kMiss);
  EXPECT_FALSE(h.present(id_of(1)));
  EXPECT_EQ(h.write(id_of(1)).status, Status::kOk);
  EXPECT_EQ(h.read(id_of(1)).status, Status::kOk);
}

TEST_F(SlabDamage, OfSlotHeadsCostsTheirSlots) {
  Place place;
  {
    Harness h(o);
    ASSERT_EQ(write_range(h, 0, 10), 10u);
    place = place_of(dir.path(), id_of(4));
  }
  flip_byte(place.file, place.head + 9);
  Harness h(o);
  EXPECT_EQ(h.stat("slab_scanned_corrupt"), 1u);
  EXPECT_FALSE(h.present(id_of(4)));
  EXPECT_EQ(load_range(h, 0, 10), 9);
  EXPECT_EQ(h.write(id_of(4)).status, Status::kOk);
  EXPECT_EQ(load_range(h, 0, 10), 10);
}

// A head that is sound but whose slot was given to another object since: power lost in between.
TEST_F(SlabDamage, AHeadWithoutItsData) {
  Place a, b;
  {
    Harness h(o);
    ASSERT_EQ(write_range(h, 0, 2), 2u);
    a = place_of(dir.path(), id_of(0));
    b = place_of(dir.path(), id_of(1));
  }
  std::vector<std::byte> slot(4096 + small_geometry().object_bytes());
  const int fd = ::open(b.file.c_str(), O_RDONLY);
  ASSERT_EQ(pread(fd, slot.data(), slot.size(), static_cast<off_t>(b.slot)),
            static_cast<ssize_t>(slot.size()));
  ::close(fd);
  overwrite(a.file, a.slot, slot);
  Harness h(o);
  EXPECT_TRUE(h.present(id_of(0)));
  EXPECT_EQ(h.read(id_of(0)).status, Status::kCorrupt);
  EXPECT_FALSE(h.present(id_of(0)));
  EXPECT_EQ(h.read(id_of(1)).status, Status::kOk);
}

TEST_F(SlabDamage, OfAFileHeadCostsThatFile) {
  {
    Harness h(o);
    ASSERT_EQ(write_range(h, 0, 60), 60u);
  }
  ASSERT_EQ(raw_slabs(dir.path()).size(), 4u);
  flip_byte(place_of(dir.path(), id_of(0)).file, 20);
  Harness h(o);
  const int left = load_range(h, 0, 60);
  EXPECT_LT(left, 60);
  EXPECT_GT(left, 10);
  EXPECT_EQ(write_range(h, 0, 60), 60u);
  EXPECT_EQ(load_range(h, 0, 60), 60);
}

TEST_F(SlabDamage, FilesThatAreDeletedWhileWeRun) {
  auto quick = o;
  quick.probe_interval = milliseconds(60'000);
  Harness h(quick);
  ASSERT_EQ(write_range(h, 0, 10), 10u);
  fs::remove_all(dir.path() / "ns-test");
  EXPECT_NE(h.write(id_of(50)).status, Status::kOk) << "nobody would find it";
  EXPECT_FALSE(h.present(id_of(1))) << "the directory is out";
  EXPECT_NE(h.stage->health(), "");
}

TEST_F(SlabDamage, WritesThatFailLeaveNothing) {
  auto faulty = o;
  int mode = 0;
  faulty.engine = "psync";
  faulty.faults = std::make_shared<Faults>([&](IoStep step, const std::string&, std::size_t& n) {
    if (step != IoStep::kWrite) return 0;
    if (mode == 1 && n > 8192) return -EIO;             // data
    if (mode == 2 && n == 4096) return -EIO;            // slot heads
    if (mode == 3) n = std::min<std::size_t>(n, 4096);  // short transfers
    return 0;
  });
  Harness h(faulty);
  ASSERT_EQ(h.write(id_of(0)).status, Status::kOk);
  const auto free = h.stat("slab_slots_free");
  for (mode = 1; mode <= 2; ++mode) {
    const Outcome out = h.write(id_of(mode));
    EXPECT_EQ(out.status, Status::kIoError) << mode;
    EXPECT_EQ(out.error, EIO);
    EXPECT_FALSE(h.present(id_of(mode)));
    EXPECT_EQ(h.stat("slab_slots_free"), free) << "no slot is lost";
  }
  mode = 3;
  EXPECT_EQ(h.write(id_of(3)).status, Status::kOk);
  EXPECT_EQ(h.read(id_of(3)).status, Status::kOk);
  mode = 0;
  EXPECT_EQ(write_range(h, 10, 20), 10u);
  EXPECT_EQ(load_range(h, 0, 20), 12);
}

}  // namespace
}  // namespace ucm
