// What the layout slab refuses at start, and that each refusal names both sides.
#include <gtest/gtest.h>

#include <fstream>

#include "slab/lease.h"
#include "slab_kit.h"

namespace ucm {
namespace {

using namespace slab_test;

std::string refusal(const PosixOptions& o, const Geometry& g = small_geometry()) {
  try {
    const auto stage = make_posix_stage(g, o);
    return "";
  } catch (const PosixSetupError& e) {
    return e.what();
  }
}

bool has(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts) {
    if (text.find(part) == std::string::npos) {
      ADD_FAILURE() << "'" << part << "' is not in: " << text;
      return false;
    }
  }
  return true;
}

void write_lease(const TempDir& dir, const std::string& host, const std::string& boot,
                 const std::string& machine) {
  std::ofstream out(dir.path() / "ns-test" / ".ucm-slab", std::ios::trunc);
  out << "ucm-slab 1\nslab_bytes 1048576\nslabs 4\nstate used\nhost " << host << "\nmachine "
      << machine << "\nboot " << boot << "\npid 7\n";
}

TEST(SlabRefusal, WithoutCapacity) {
  const TempDir dir;
  auto o = slab_options({dir.str()}, 0);
  EXPECT_TRUE(has(refusal(o), {"posix_capacity_gb is required"}));
  o.gc.capacity_bytes = 8192;
  EXPECT_TRUE(has(refusal(o), {"posix_capacity_gb is too small", "needed at least"}));
  o.layout = "slabs";
  EXPECT_TRUE(has(refusal(o), {"posix_layout must be file or slab, got 'slabs'"}));
}

TEST(SlabRefusal, NotEnoughSpaceNamesBothSizes) {
  const TempDir dir;
  const auto space = fs::space(dir.path());
  const auto o = slab_options({dir.str()}, space.available + (std::uint64_t{1} << 40));
  const std::string text = refusal(o);
  EXPECT_TRUE(has(text, {"not enough space", "needed", "available", "posix_capacity_gb"}));
  EXPECT_EQ(raw_slabs(dir.path()).size(), 0u) << "what it has made is removed";
  EXPECT_EQ(refusal(slab_options({dir.str()})), "") << "and a smaller one starts";
}

TEST(SlabRefusal, TheOtherLayout) {
  const TempDir file_dir, slab_dir;
  {
    Harness h(options_for({file_dir.str()}));
    ASSERT_EQ(h.write(id_of(1)).status, Status::kOk);
    Harness s(slab_options({slab_dir.str()}));
    ASSERT_EQ(s.write(id_of(1)).status, Status::kOk);
  }
  EXPECT_TRUE(has(refusal(slab_options({file_dir.str()})),
                  {"holds the layout file", "configured is posix_layout slab"}));
  EXPECT_TRUE(has(refusal(options_for({slab_dir.str()})),
                  {"holds the layout slab", "configured is posix_layout file"}));
  Harness h(options_for({file_dir.str()}));
  EXPECT_EQ(h.read(id_of(1)).status, Status::kOk) << "nothing was touched";
}

TEST(SlabRefusal, AnotherCapacityWhileInUse) {
  const TempDir dir;
  Harness h(slab_options({dir.str()}));
  const auto other = slab_options({dir.str()}, 8u << 20);
  const std::vector<std::string> both = {"0.004 GiB", "0.008 GiB"};
  EXPECT_TRUE(has(refusal(other), both));
  EXPECT_EQ(end_of(child([&] { return has(refusal(other), both) ? 0 : 1; })), 0);
}

TEST(SlabRefusal, ObjectsThatDoNotFit) {
  const TempDir dir;
  Harness h(slab_options({dir.str()}));
  EXPECT_TRUE(has(refusal(slab_options({dir.str()}), small_geometry(64, 64 * 1024)),
                  {"do not fit", "0.001 GiB", "0.004 GiB"}));
}

TEST(SlabRefusal, AnotherHost) {
  const TempDir dir;
  { Harness h(slab_options({dir.str()})); }
  const auto me = slab::HostName::of_this_host();
  write_lease(dir, "other-host", "11111111-2222-3333-4444-555555555555", "someone");
  EXPECT_TRUE(has(refusal(slab_options({dir.str()})),
                  {"host other-host", "11111111-2222-3333-4444-555555555555", me.host, me.boot}));
  // Silent for longer than its lease: it is gone.
  auto o = slab_options({dir.str()});
  o.lease_ttl = milliseconds(1);
  EXPECT_TRUE(eventually([&] { return refusal(o).empty(); }));
}

TEST(SlabRefusal, ThisHostAfterAReboot) {
  const TempDir dir;
  { Harness h(slab_options({dir.str()})); }
  const auto me = slab::HostName::of_this_host();
  if (me.machine.empty()) GTEST_SKIP() << "this machine has no /etc/machine-id";
  write_lease(dir, me.host, "11111111-2222-3333-4444-555555555555", me.machine);
  EXPECT_EQ(refusal(slab_options({dir.str()})), "");
}

TEST(SlabRefusal, ProcessesThatDoNotShareTheIndex) {
  const TempDir dir, shm;
  Harness h(slab_options({dir.str()}));
  ASSERT_EQ(h.write(id_of(1)).status, Status::kOk);
  auto other = slab_options({dir.str()});
  other.shm_directory = shm.str();
  EXPECT_EQ(end_of(child([&] {
              return has(refusal(other), {"without sharing our index", "same /dev/shm"}) ? 0 : 1;
            })),
            0);
  EXPECT_EQ(h.read(id_of(1)).status, Status::kOk);
}

TEST(SlabRefusal, AHostThatTakesOverIsNoticed) {
  const TempDir dir;
  auto o = slab_options({dir.str()});
  o.lease_ttl = milliseconds(100);
  o.probe_interval = milliseconds(20);
  Harness h(o);
  ASSERT_EQ(h.write(id_of(1)).status, Status::kOk);
  write_lease(dir, "other-host", "11111111-2222-3333-4444-555555555555", "someone");
  EXPECT_TRUE(eventually([&] { return !h.stage->health().empty(); }));
  EXPECT_TRUE(has(h.stage->health(), {"was taken by another host"}));
  EXPECT_FALSE(h.present(id_of(1)));
  EXPECT_EQ(h.write(id_of(2)).status, Status::kRejected) << "no byte goes there any more";
}

TEST(SlabRefusal, CapacityMayChangeBetweenRuns) {
  const TempDir dir;
  {
    Harness h(slab_options({dir.str()}));
    ASSERT_EQ(write_range(h, 0, 80), 80u);
  }
  {
    Harness h(slab_options({dir.str()}, 8u << 20));
    EXPECT_EQ(load_range(h, 0, 80), 80);
    EXPECT_EQ(raw_slabs(dir.path()).size(), 8u) << "the files keep their size";
  }
  Harness h(slab_options({dir.str()}, 2u << 20));
  EXPECT_EQ(raw_slabs(dir.path()).size(), 2u);
  EXPECT_GT(load_range(h, 0, 80), 20);
}

}  // namespace
}  // namespace ucm
