// First touch: no copy into a buffer of ours meets a page that is not there yet.
#include <sys/mman.h>
#include <sys/resource.h>

#include "cache_fixture.h"
#include "memory/populate.h"
#include "ucm/staging_tier.h"

namespace ucm::testing {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kBytes = 32u << 20;

/// Page faults that writing to every page costs this thread (not those of a sanitizer's shadow).
[[gnu::no_sanitize_thread, gnu::no_sanitize_address]] long faults_of_writing(
    std::span<std::byte> memory) {
  rusage before{};
  rusage after{};
  ::getrusage(RUSAGE_THREAD, &before);
  for (std::size_t at = 0; at < memory.size(); at += kPage) {
    *static_cast<volatile std::byte*>(&memory[at]) = std::byte{1};
  }
  ::getrusage(RUSAGE_THREAD, &after);
  return after.ru_minflt - before.ru_minflt;
}

std::span<std::byte> fresh_mapping() {
  void* const p =
      ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EXPECT_NE(p, MAP_FAILED);
  (void)::madvise(p, kBytes, MADV_NOHUGEPAGE);
  return {static_cast<std::byte*>(p), kBytes};
}

constexpr long kPages = kBytes / kPage;
constexpr long kFew = kPages / 50;  // the kernel may take a page back now and then

TEST(FirstTouch, TheControlFaultsOnEveryPage) {
  const auto memory = fresh_mapping();
  EXPECT_GT(faults_of_writing(memory), kPages - kFew);
  ::munmap(memory.data(), memory.size());
}

TEST(FirstTouch, PopulateTouchesEveryPageWithAnyNumberOfThreads) {
  for (const unsigned threads : {0U, 1U, 3U}) {
    const auto memory = fresh_mapping();
    ASSERT_EQ(memory::populate(memory.data(), memory.size() - 100, threads, memory::Touch::kWrite),
              0);
    EXPECT_LT(faults_of_writing(memory), kFew);
    ::munmap(memory.data(), memory.size());
  }
}

TEST(FirstTouch, MemoryThatIsNotThereIsAnError) {
  const auto memory = fresh_mapping();
  ::munmap(memory.data(), memory.size());
  EXPECT_EQ(memory::populate(memory.data(), memory.size(), 1, memory::Touch::kWrite), ENOMEM);
}

TEST(FirstTouch, StagingBuffersAreTouchedBeforeTheFirstTask) {
  const Geometry g = geometry_of(4, 64 << 10);
  const StagingTier tier(g, 32, 96);
  ASSERT_EQ(tier.regions().size(), 1u);
  ASSERT_EQ(tier.regions()[0].size(), kBytes);
  EXPECT_LT(faults_of_writing(tier.regions()[0]), kFew);
}

class FirstTouchCache : public CacheTest, public ::testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(Kinds, FirstTouchCache, ::testing::Bool(),
                         [](const auto& given) { return given.param ? "shared" : "private"; });

TEST_P(FirstTouchCache, TheSegmentIsTouchedByEveryProcessThatMapsIt) {
  CacheOptions options;
  options.name = "touch";
  options.directory = directory;
  options.shared = GetParam();
  options.capacity_bytes = kBytes;
  options.capacity_explicit = true;
  options.load_reserve = 0;
  options.load_reserve_explicit = true;
  const auto tier = open_cache(geometry_of(4, 64 << 10), options);
  ASSERT_EQ(tier->regions().size(), 1u);
  EXPECT_GE(tier->regions()[0].size(), kBytes);
  EXPECT_LT(faults_of_writing(tier->regions()[0]), kFew);
}

}  // namespace
}  // namespace ucm::testing
