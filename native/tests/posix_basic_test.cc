// Write, look up, read; what lies on disk; every engine.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <set>
#include <thread>

#include "posix/engine.h"
#include "posix/format.h"
#include "posix_kit.h"

namespace ucm::posix_test {
namespace {

class PosixEngines : public testing::TestWithParam<const char*> {
 protected:
  PosixOptions options(const TempDir& dir) {
    auto o = options_for({dir.str()});
    o.engine = GetParam();
    return o;
  }
  void SetUp() override {
    const auto support = posix::probe_engines();
    if (std::string(GetParam()) == "io_uring" && !support.uring)
      GTEST_SKIP() << support.uring_reason;
    if (std::string(GetParam()) == "aio" && !support.aio) GTEST_SKIP() << support.aio_reason;
  }
};

TEST_P(PosixEngines, ManyObjectsComeBackWhole) {
  const TempDir dir;
  Harness h(options(dir));
  constexpr std::size_t kN = 300;
  std::vector<Region> from;
  std::vector<WriteOp> writes;
  for (std::size_t i = 0; i < kN; ++i) {
    from.emplace_back(h.geometry, id_of(i));
    writes.push_back({id_of(i), from.back().data(), i});
  }
  auto written = std::make_shared<Results>(kN);
  h.stage->write(writes, written, in(milliseconds(20'000)));
  ASSERT_TRUE(written->wait());
  ASSERT_EQ(written->count(Status::kOk), kN);

  std::vector<BlockId> ids;
  for (std::size_t i = 0; i < kN + 50; ++i) ids.push_back(id_of(i));
  std::vector<std::uint8_t> present(ids.size(), 9);
  h.stage->lookup(ids, present, false);
  for (std::size_t i = 0; i < ids.size(); ++i) EXPECT_EQ(present[i], i < kN ? 1 : 0) << i;

  std::vector<Region> into;
  std::vector<ReadOp> reads;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    into.emplace_back(h.geometry);
    reads.push_back({ids[i], into.back().data(), 0, h.geometry.shard_count, i, i % 3 != 0});
  }
  auto got = std::make_shared<Results>(ids.size());
  h.stage->read(reads, got, in(milliseconds(20'000)));
  ASSERT_TRUE(got->wait());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ASSERT_EQ(got->at(i).status, i < kN ? Status::kOk : Status::kMiss) << i;
    if (i < kN) {
      ASSERT_TRUE(into[i].holds(ids[i])) << i;
    }
  }
  EXPECT_EQ(h.stat("writes_total"), kN);
  EXPECT_EQ(h.stat("reads_total"), kN);
  EXPECT_EQ(h.stat("read_misses_total"), 50u);
  EXPECT_EQ(h.stat("reads_in_flight"), 0u);
  EXPECT_EQ(h.stat("writes_in_flight"), 0u);
  EXPECT_EQ(count_temps(dir.path()), 0u);
  EXPECT_EQ(h.stage->health(), "");
  EXPECT_TRUE(h.stage->describe().at("engine.0").starts_with(GetParam()));
}

TEST_P(PosixEngines, PartOfAnObject) {
  const TempDir dir;
  Harness h(small_geometry(7, 5000), options(dir));
  const BlockId id = id_of(1);
  ASSERT_EQ(h.write(id).status, Status::kOk);
  for (std::uint32_t begin = 0; begin < 7; ++begin) {
    for (std::uint32_t end = begin + 1; end <= 7; ++end) {
      Region into(h.geometry);
      auto got = std::make_shared<Results>(1);
      const ReadOp op{id, into.data(), begin, end, 0, true};
      h.stage->read({&op, 1}, got, in(milliseconds(5'000)));
      ASSERT_TRUE(got->wait());
      ASSERT_EQ(got->at(0).status, Status::kOk);
      ASSERT_TRUE(into.holds(id, begin, end));
      // Nothing outside the shards asked for was touched.
      for (std::uint64_t i = 0; i < h.geometry.object_bytes(); ++i) {
        if (i >= h.geometry.shard_offset(begin) && i < h.geometry.shard_offset(end)) continue;
        ASSERT_EQ(into.data()[i], std::byte{0xEE}) << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, PosixEngines, testing::Values("io_uring", "aio", "psync"));

TEST(PosixDisk, FilesAreWhatAnOperatorExpects) {
  const TempDir dir;
  Harness h(small_geometry(3, 3000), options_for({dir.str()}));  // odd size, direct I/O
  const BlockId id = id_of(5);
  ASSERT_EQ(h.write(id).status, Status::kOk);
  const auto file = object_path(dir.path(), id);
  struct stat st {};
  ASSERT_EQ(stat(file.c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 07777, 0600u);
  EXPECT_EQ(static_cast<std::uint64_t>(st.st_size), 4096u + 3 * 4096u);
  EXPECT_EQ(std::to_string(st.st_size), h.stage->describe().at("file_bytes"));
  for (auto p = file.parent_path(); p != dir.path(); p = p.parent_path()) {
    ASSERT_EQ(stat(p.c_str(), &st), 0);
    EXPECT_EQ(st.st_mode & 07777, 0700u) << p;
  }
  std::ifstream in(file, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(in)), {});
  const Region want(h.geometry, id);
  for (std::uint32_t s = 0; s < 3; ++s) {
    EXPECT_EQ(std::memcmp(bytes.data() + 4096 + s * 4096, want.data() + s * 4096, 3000), 0);
  }
  EXPECT_NE(bytes.find(h.geometry.layout), std::string::npos);
}

TEST(PosixDisk, DumpOfAStoredObjectIsSuccessWithoutWriting) {
  const TempDir dir;
  Harness h(options_for({dir.str()}));
  ASSERT_EQ(h.write(id_of(1)).status, Status::kOk);
  const auto before = fs::last_write_time(object_path(dir.path(), id_of(1)));
  ASSERT_EQ(h.write(id_of(1)).status, Status::kOk);
  EXPECT_EQ(fs::last_write_time(object_path(dir.path(), id_of(1))), before);
  EXPECT_EQ(h.stat("write_existing_total"), 1u);
}

TEST(PosixDisk, ANewInstanceFindsEverything) {
  const TempDir dir;
  {
    Harness h(options_for({dir.str()}));
    ASSERT_EQ(h.write(id_of(1)).status, Status::kOk);
  }
  Harness h(options_for({dir.str()}));
  EXPECT_TRUE(h.present(id_of(1)));
  EXPECT_EQ(h.read(id_of(1)).status, Status::kOk);
}

TEST(PosixDisk, RemoveThenLookupThenWrite) {
  const TempDir dir;
  Harness h(options_for({dir.str()}));
  for (int round = 0; round < 50; ++round) {
    const BlockId id = id_of(1);
    ASSERT_EQ(h.write(id).status, Status::kOk);
    ASSERT_TRUE(h.present(id));
    h.stage->remove({&id, 1});
    ASSERT_FALSE(h.present(id));
  }
}

// B28: bad alignment is an explicit refusal; file systems of all kinds and odd sizes work; a file is
// never empty.
TEST(PosixDirect, AlignmentAndFallback) {
  for (const char* base : {"", "/dev/shm"}) {
    for (const bool direct : {true, false}) {
      const TempDir dir(base);
      auto o = options_for({dir.str()});
      o.direct = direct;
      Harness h(small_geometry(3, 3000), o);
      ASSERT_EQ(h.write(id_of(1)).status, Status::kOk);
      ASSERT_EQ(h.read(id_of(1)).status, Status::kOk);
      EXPECT_EQ(h.stage->describe().at("direct.0"),
                direct ? h.stage->describe().at("direct.0") : "off");

      std::vector<std::byte> loose(h.geometry.object_bytes() + 8192);
      auto* base_ptr = reinterpret_cast<std::byte*>(
          align_up(reinterpret_cast<std::uintptr_t>(loose.data()), kIoAlign));
      auto results = std::make_shared<Results>(2);
      const WriteOp w{id_of(2), base_ptr + 64, 0};
      const ReadOp r{id_of(1), base_ptr + 64, 0, 3, 1, true};
      h.stage->write({&w, 1}, results, in(milliseconds(5000)));
      h.stage->read({&r, 1}, results, in(milliseconds(5000)));
      ASSERT_TRUE(results->wait());
      for (int i = 0; i < 2; ++i) {
        EXPECT_EQ(results->at(i).status, Status::kRejected);
        EXPECT_EQ(results->at(i).error, EINVAL);
      }
      EXPECT_FALSE(h.present(id_of(2)));
      h.stage->shutdown(in(milliseconds(5000)));
      for (const auto& e : fs::recursive_directory_iterator(dir.path())) {
        if (e.is_regular_file() && e.path().filename() != ".ucm") {
          EXPECT_GT(e.file_size(), 0u) << e.path();
        }
      }
    }
  }
}

TEST(PosixSetup, RefusalsNameWhatIsWrong) {
  const TempDir dir;
  const auto message = [](const Geometry& g, const PosixOptions& o) -> std::string {
    try {
      (void)make_posix_stage(g, o);
    } catch (const PosixSetupError& e) {
      return e.what();
    }
    return "accepted";
  };
  const auto g = small_geometry();
  auto o = options_for({dir.str()});
  o.engine = "warp";
  EXPECT_NE(message(g, o).find("warp"), std::string::npos);
  EXPECT_NE(message(g, o).find("psync"), std::string::npos);
  o = options_for({dir.str()});
  o.engine = "aio";
  o.direct = false;
  EXPECT_NE(message(g, o).find("direct"), std::string::npos);
  EXPECT_NE(message(g, options_for({})).find("storage_backends"), std::string::npos);
  EXPECT_NE(message(g, options_for({dir.str(), dir.str() + "/."})).find("same directory"),
            std::string::npos);
  o = options_for({dir.str()});
  o.namespace_dir = "../up";
  EXPECT_NE(message(g, o).find("../up"), std::string::npos);
  { std::ofstream(dir.path() / "file") << "x"; }
  const auto not_dir = message(g, options_for({dir.str() + "/file/sub"}));
  EXPECT_NE(not_dir.find("ENOTDIR"), std::string::npos) << not_dir;
  EXPECT_NE(not_dir.find(dir.str() + "/file"), std::string::npos) << not_dir;
  EXPECT_NE(message(small_geometry(0), options_for({dir.str()})).find("no shards"),
            std::string::npos);
}

TEST(PosixSetup, UseAfterForkIsRefusedAndTheParentLives) {
  const TempDir dir;
  Harness h(options_for({dir.str()}));
  ASSERT_EQ(h.write(id_of(1)).status, Status::kOk);
  const pid_t child = fork();
  if (child == 0) {
    Region into(h.geometry);
    auto results = std::make_shared<Results>(1);
    const ReadOp op{id_of(1), into.data(), 0, 4, 0, true};
    h.stage->read({&op, 1}, results, in(milliseconds(1000)));
    const bool right = results->wait(milliseconds(1000)) &&
                       results->at(0).status == Status::kClosed && !h.present(id_of(1));
    h.stage.reset();  // must neither hang nor crash
    _exit(right ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(h.read(id_of(1)).status, Status::kOk);
}

TEST(PosixSetup, ShutdownFinishesWhatWasAskedAndRefusesTheRest) {
  const TempDir dir;
  Harness h(options_for({dir.str()}));
  constexpr std::size_t kN = 100;
  std::vector<Region> from;
  std::vector<WriteOp> ops;
  for (std::size_t i = 0; i < kN; ++i) {
    from.emplace_back(h.geometry, id_of(i));
    ops.push_back({id_of(i), from.back().data(), i});
  }
  auto results = std::make_shared<Results>(kN);
  h.stage->write(ops, results, in(milliseconds(20'000)));
  h.stage->shutdown(in(milliseconds(20'000)));
  ASSERT_TRUE(results->wait(milliseconds(0)));
  EXPECT_EQ(results->count(Status::kOk), kN);
  EXPECT_EQ(h.write(id_of(200)).status, Status::kClosed);
  EXPECT_FALSE(h.present(id_of(1)));
  h.stage->shutdown(in(milliseconds(0)));  // twice is fine
}

TEST(PosixSetup, FullQueuePushesBack) {
  const TempDir dir;
  auto o = options_for({dir.str()});
  o.queue_limit = 8;
  Harness h(o);
  constexpr std::size_t kN = 64;
  std::vector<Region> from;
  std::vector<WriteOp> ops;
  for (std::size_t i = 0; i < kN; ++i) {
    from.emplace_back(h.geometry, id_of(i));
    ops.push_back({id_of(i), from.back().data(), i});
  }
  auto results = std::make_shared<Results>(kN);
  h.stage->write(ops, results, in(milliseconds(20'000)));
  ASSERT_TRUE(results->wait());
  const auto refused = results->count(Status::kRejected);
  EXPECT_GT(refused, 0u);
  EXPECT_EQ(refused + results->count(Status::kOk), kN);
  EXPECT_EQ(h.stat("write_refused_total"), refused);
}

TEST(PosixLookup, StopsAtTheFirstMiss) {
  const TempDir dir;
  Harness h(options_for({dir.str()}));
  for (int i = 0; i < 10; ++i) ASSERT_EQ(h.write(id_of(i)).status, Status::kOk);
  std::vector<BlockId> ids;
  for (int i = 0; i < 10; ++i) ids.push_back(id_of(i));
  ids[4] = id_of(99);
  std::vector<std::uint8_t> present(10, 9);
  h.stage->lookup(ids, present, true);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(present[i], 1);
  EXPECT_EQ(present[4], 0);
}

}  // namespace
}  // namespace ucm::posix_test
