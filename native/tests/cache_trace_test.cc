// CLOCK on real requests: the figures of a single-threaded CLOCK (set on insert and on touch, the hand
// clears ones and takes the first zero) must come out exactly, whatever sits between.
#include <fstream>
#include <iterator>
#include <vector>

#include "cache_fixture.h"

namespace ucm::testing {
namespace {

using Request = std::vector<std::uint64_t>;

std::vector<Request> conversation() {
  std::ifstream in(std::string(UCM_TEST_DATA) + "/conversation.trace", std::ios::binary);
  const std::vector<char> raw((std::istreambuf_iterator<char>(in)), {});
  std::size_t at = 0;
  const auto number = [&] {
    std::uint64_t n = 0;
    for (int shift = 0; at < raw.size(); shift += 7) {
      const auto byte = static_cast<std::uint8_t>(raw[at++]);
      n |= std::uint64_t{byte & 0x7fU} << shift;
      if (byte < 0x80) break;
    }
    return n;
  };
  std::vector<Request> requests;
  while (at < raw.size()) {
    Request& r = requests.emplace_back();
    for (std::uint64_t runs = number(); runs > 0; --runs) {
      const std::uint64_t first = number(), length = number();
      for (std::uint64_t i = 0; i < length; ++i) r.push_back(first + i);
    }
  }
  return requests;
}

class CacheTrace : public ::testing::TestWithParam<std::pair<std::uint64_t, std::uint64_t>> {};

TEST_P(CacheTrace, PrefixHitsAreThoseOfClock) {
  static const std::vector<Request> requests = conversation();
  ASSERT_EQ(requests.size(), 12'031u);
  const auto [capacity, expected] = GetParam();
  const Geometry g = geometry_of(1, 64);
  CacheOptions o;
  o.name = "trace";
  o.shared = false;
  o.capacity_bytes = capacity * g.object_bytes();
  o.load_reserve = 0;
  o.load_reserve_explicit = true;
  const auto tier = open_cache(g, o);
  std::uint64_t hits = 0, references = 0;
  std::vector<BlockId> ids;
  std::vector<std::uint8_t> here;
  for (const Request& request : requests) {
    ids.clear();
    for (const std::uint64_t n : request) ids.push_back(id_of(n));
    here.assign(ids.size(), 0);
    tier->lookup(ids, here);
    std::size_t prefix = 0;
    while (prefix < here.size() && here[prefix] != 0) ++prefix;
    hits += prefix;
    references += ids.size();
    for (const BlockId& id : ids) ASSERT_TRUE(put(*tier, id));  // touches what is there
  }
  EXPECT_EQ(references, 288'500u);
  EXPECT_EQ(tier->stats().at("slots"), capacity);
  EXPECT_EQ(hits, expected);
}

INSTANTIATE_TEST_SUITE_P(Conversation, CacheTrace,
                         ::testing::Values(std::pair{1'000ULL, 12'825ULL},
                                           std::pair{5'000ULL, 30'894ULL},
                                           std::pair{10'000ULL, 56'732ULL},
                                           std::pair{30'000ULL, 90'660ULL},
                                           std::pair{50'000ULL, 100'510ULL}));

}  // namespace
}  // namespace ucm::testing
