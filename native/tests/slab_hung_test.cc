// I/O of the layout slab that hangs in the kernel: others are served, shutdown is bounded.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "slab_kit.h"

namespace ucm {
namespace {

using namespace slab_test;

/// Hangs the first step of one kind that comes once it is set, until it is let go.
struct Hang {
  std::atomic<bool> set{false};
  std::atomic<bool> hit{false};
  std::atomic<bool> go{false};
};

std::shared_ptr<IoFaults> hanging(std::shared_ptr<Hang> hang, IoStep kind) {
  return std::make_shared<Faults>([hang, kind](IoStep step, const std::string&, std::size_t&) {
    if (step == kind && hang->set.exchange(false)) {
      hang->hit = true;
      while (!hang->go) std::this_thread::sleep_for(milliseconds(2));
    }
    return 0;
  });
}

PosixOptions quick(const TempDir& dir) {
  auto o = slab_options({dir.str()});
  o.engine = "psync";  // the plan hangs a thread, and what it alone has in flight
  o.read_threads = 2;
  o.stall = milliseconds(100);
  return o;
}

TEST(SlabHung, AReadHoldsUpNobodyElse) {
  const TempDir dir;
  const auto hang = std::make_shared<Hang>();
  auto o = quick(dir);
  o.faults = hanging(hang, IoStep::kRead);
  Harness h(o);
  ASSERT_EQ(write_range(h, 0, 20), 20u);
  hang->set = true;
  Region into(h.geometry);
  const auto stuck = std::make_shared<Results>(1);
  const ReadOp op{id_of(0), into.data(), 0, h.geometry.shard_count, 0};
  h.stage->read({&op, 1}, stuck, in(milliseconds(20'000)));
  ASSERT_TRUE(eventually([&] { return hang->hit.load(); }));
  EXPECT_EQ(load_range(h, 1, 20), 19);
  EXPECT_TRUE(eventually([&] { return h.stat("stuck_threads") == 1; }));
  EXPECT_TRUE(eventually([&] { return h.stat("threads_replaced_total") == 1; }));
  // Its slot is pinned for as long: whatever is written, the bytes stay.
  for (int i = 100; i < 400; i += 10) EXPECT_EQ(write_range(h, i, i + 10), 10u);
  hang->go = true;
  ASSERT_TRUE(stuck->wait());
  EXPECT_EQ(stuck->at(0).status, Status::kOk);
  EXPECT_TRUE(into.holds(id_of(0)));
  EXPECT_TRUE(eventually([&] { return h.stat("stuck_threads") == 0; }));
}

TEST(SlabHung, ShutdownIsBoundedAndTheDirectoryServesOn) {
  const TempDir dir;
  const auto hang = std::make_shared<Hang>();
  const auto from = std::make_shared<Region>(small_geometry(), id_of(7));
  const auto stuck = std::make_shared<Results>(1);
  {
    auto o = quick(dir);
    o.faults = hanging(hang, IoStep::kWrite);
    Harness h(o);
    ASSERT_EQ(write_range(h, 0, 5), 5u);
    hang->set = true;
    const WriteOp op{id_of(7), from->data(), 0};
    h.stage->write({&op, 1}, stuck, in(milliseconds(20'000)));
    ASSERT_TRUE(eventually([&] { return hang->hit.load(); }));
    const auto began = Clock::now();
    h.stage->shutdown(in(milliseconds(200)));
    EXPECT_LT(Clock::now() - began, milliseconds(3'000));
    EXPECT_EQ(h.stage->stats().at("stuck_threads"), 1u);
  }
  {
    Harness h(quick(dir));  // the index lives on, with the group that the thread still owns
    EXPECT_EQ(load_range(h, 0, 5), 5);
    EXPECT_FALSE(h.present(id_of(7)));
    EXPECT_EQ(h.stat("slab_groups_in_use"), 1u);
    EXPECT_EQ(write_range(h, 100, 120), 20u);
    EXPECT_EQ(load_range(h, 100, 120), 20);
    hang->go = true;
    // A thread that comes back ends what it had begun, and lets go.
    ASSERT_TRUE(stuck->wait());
    EXPECT_EQ(stuck->at(0).status, Status::kOk);
    EXPECT_EQ(h.read(id_of(7)).status, Status::kOk);
    EXPECT_TRUE(eventually([&] { return h.stat("slab_groups_in_use") == 0; }));
  }
}

}  // namespace
}  // namespace ucm
