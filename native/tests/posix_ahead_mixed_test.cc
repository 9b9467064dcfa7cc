// Packed objects and objects in another layout among plain ones: opened ahead of their turn, each is
// still read the way it needs.
#include <atomic>
#include <cstring>

#include "compress_kit.h"
#include "ucm/layout.h"

namespace ucm::compress_test {
namespace {

using namespace posix_test;

constexpr const char* kOurs = "fp32|layer:12,token:32,head:2,kv:2,elem:16";
constexpr const char* kOther = "fp32|kv:2,token:32,layer:12,head:2,elem:16";
constexpr std::size_t kObjects = 18;  // of the three kinds in turn

enum class Kind : std::uint8_t { kPlain, kPacked, kForeign };
Kind kind_of(std::size_t i) { return static_cast<Kind>(i % 3); }

Layout parse(const char* text) {
  std::string error;
  auto layout = Layout::parse(text, error);
  EXPECT_TRUE(layout) << error;
  return *layout;
}

Geometry geometry_of(const char* text) {
  const Layout layout = parse(text);
  Geometry g;
  g.shard_count = static_cast<std::uint32_t>(layout.shard_count());
  g.shard_bytes = layout.shard_bytes();
  g.runs = {{g.shard_bytes, 1, 0}};
  g.layout = layout.text();
  return g;
}

class AheadMixed : public testing::TestWithParam<const char*> {
 protected:
  PosixOptions options(std::shared_ptr<IoFaults> faults = nullptr) {
    auto o = options_for({dir.str()});
    o.engine = GetParam();
    o.direct = o.engine != "psync";
    o.depth = 3;
    o.read_threads = 1;
    o.faults = std::move(faults);
    return o;
  }

  /// Every object by a stage that stores its kind; what is in `from` afterwards is what a reader of
  /// `kOurs` must see.
  void store(const std::shared_ptr<IoFaults>& faults) {
    Harness plain(g, options(faults));
    Harness other(geometry_of(kOther), options(faults));
    const auto packing = make_compress_stage(make_posix_stage(g, options(faults)), {});
    std::string why;
    const auto conversion = Conversion::plan(parse(kOther), parse(kOurs), kIoAlign, kIoAlign, why);
    ASSERT_TRUE(conversion) << why;
    for (std::size_t i = 0; i < kObjects; ++i) {
      from.push_back(std::make_unique<Object>(g, i));
      const BlockId id = id_of(i);
      if (kind_of(i) == Kind::kPlain) {
        ASSERT_EQ(write(*plain.stage, id, *from[i]).status, Status::kOk);
      } else if (kind_of(i) == Kind::kPacked) {
        ASSERT_EQ(write(*packing, id, *from[i]).status, Status::kOk);
      } else {
        const Object stored(other.geometry, i, 0);
        ASSERT_EQ(write(*other.stage, id, stored).status, Status::kOk);
        conversion->run(from[i]->data(), stored.data(), 0, conversion->target_shards());
      }
    }
    EXPECT_EQ(packing->stats().at("compress_plain_objects_total"), 0u);
  }

  /// Shards [begin, end) of all objects in one batch: more than can be on the medium at a time.
  void read_all(Stage& stage, std::uint32_t begin, std::uint32_t end) {
    std::vector<std::unique_ptr<Object>> into;
    std::vector<ReadOp> ops;
    for (std::size_t i = 0; i < kObjects; ++i) {
      into.push_back(std::make_unique<Object>(g, 999, 1));
      ops.push_back({id_of(i), into[i]->data(), begin, end, i, i % 2 == 0, nullptr});
    }
    const auto results = std::make_shared<AllShards>(kObjects, end - begin);
    stage.read(ops, results, in(milliseconds(20'000)));
    ASSERT_TRUE(results->wait());
    for (std::size_t i = 0; i < kObjects; ++i) {
      EXPECT_TRUE(results->good(i)) << "object " << i;
      EXPECT_TRUE(into[i]->equals(*from[i], begin, end)) << "object " << i;
    }
  }

  void read_in_parts(Stage& stage) {
    read_all(stage, 0, g.shard_count);
    read_all(stage, 5, 7);
    read_all(stage, 1, g.shard_count);
    const auto stats = stage.stats();
    EXPECT_EQ(stats.at("reads_packed_total"), kObjects);  // a third of the objects, three times
    EXPECT_GE(stats.at("convert_reads_total"), kObjects / 3);
    EXPECT_EQ(stats.at("read_corrupt_total"), 0u);
  }

  /// Shards of many objects, in whatever pieces they are told.
  class AllShards : public ReadSink {
   public:
    AllShards(std::size_t objects, std::uint32_t shards) : good_(objects), shards_(shards) {}
    void on_read(std::uint64_t cookie, std::uint32_t begin, std::uint32_t end,
                 Outcome o) noexcept override {
      const std::scoped_lock lock(mutex_);
      told_ += end - begin;
      if (o.status == Status::kOk) good_[cookie] += end - begin;
      done_.notify_all();
    }
    [[nodiscard]] bool wait() {
      std::unique_lock lock(mutex_);
      return done_.wait_for(lock, milliseconds(20'000),
                            [this] { return told_ >= good_.size() * shards_; });
    }
    [[nodiscard]] bool good(std::size_t i) {
      const std::scoped_lock lock(mutex_);
      return good_[i] == shards_;
    }

   private:
    std::mutex mutex_;
    std::condition_variable done_;
    std::vector<std::uint32_t> good_;
    const std::uint32_t shards_;
    std::size_t told_ = 0;
  };

  const Geometry g = geometry_of(kOurs);
  const TempDir dir;
  std::vector<std::unique_ptr<Object>> from;
};
INSTANTIATE_TEST_SUITE_P(Engines, AheadMixed, testing::Values("io_uring", "aio", "psync"));

TEST_P(AheadMixed, EachIsReadTheWayItNeeds) {
  store(nullptr);
  const auto stage = make_compress_stage(make_posix_stage(g, options()), {});
  read_in_parts(*stage);
}

// A short transfer of many pieces ends anywhere in the list.
TEST_P(AheadMixed, AlsoWhenEveryOtherTransferIsShort) {
  std::atomic<unsigned> n{0};
  const auto faults =
      std::make_shared<Faults>([&n](IoStep step, const std::string&, std::size_t& bytes) {
        const bool transfer = step == IoStep::kRead || step == IoStep::kWrite;
        if (transfer && bytes > 2 * kIoAlign && ++n % 2 == 0) bytes -= kIoAlign;
        return 0;
      });
  store(faults);
  const auto stage = make_compress_stage(make_posix_stage(g, options(faults)), {});
  read_in_parts(*stage);
  EXPECT_GT(n.load(), kObjects);
}

}  // namespace
}  // namespace ucm::compress_test
