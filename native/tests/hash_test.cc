#include "ucm/hash.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

namespace ucm::hash {
namespace {

std::string hex(const std::uint8_t* bytes, std::size_t n) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string out;
  for (std::size_t i = 0; i < n; ++i) {
    out += digits[bytes[i] >> 4];
    out += digits[bytes[i] & 15];
  }
  return out;
}

std::vector<std::uint8_t> chain(const Tokens& tokens, std::size_t block,
                                std::span<const Extra> extras = {}) {
  std::vector<std::uint8_t> out(tokens.size() / block * kDigestBytes);
  extend_chain({}, tokens, block, extras, out);
  return out;
}

TEST(Hash, FirstPageOfSixteen) {
  std::vector<std::uint32_t> ids(16);
  std::iota(ids.begin(), ids.end(), 0u);
  Tokens tokens;
  tokens.narrow = ids;
  EXPECT_EQ(hex(chain(tokens, 16).data(), kDigestBytes),
            "5d85718ec594b982c252d0279e5966ffca33a5eaf2a455038d3ab331fde70cea");
}

TEST(Hash, WhereIdsLieDoesNotMatter) {
  // More ids than the narrowing chunk, split between pending and new at every kind of place.
  std::vector<std::uint64_t> ids(1200);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = i * 2654435761u % 150000;
  std::vector<std::uint32_t> narrow(ids.begin(), ids.end());
  Tokens all;
  all.narrow = narrow;
  const auto expected = chain(all, 300);
  for (const std::size_t cut : {0u, 1u, 299u, 300u, 301u, 900u, 1200u}) {
    Tokens t;
    t.pending = std::span(ids).first(cut);
    t.wide = std::span<const std::uint64_t>(ids).subspan(cut);
    EXPECT_EQ(chain(t, 300), expected) << cut;
    t.wide = {};
    t.narrow = std::span<const std::uint32_t>(narrow).subspan(cut);
    EXPECT_EQ(chain(t, 300), expected) << cut;
  }
}

TEST(Hash, OneWideIdMakesItsBlockWide) {
  std::vector<std::uint64_t> wide(8, 1);
  wide[3] = std::uint64_t{1} << 32;
  std::vector<std::uint32_t> truncated(8, 1);
  truncated[3] = 0;
  Tokens a;
  a.wide = wide;
  Tokens b;
  b.narrow = truncated;
  EXPECT_NE(chain(a, 8), chain(b, 8));
  // A wide id among the pending ones widens the narrow rest of its block too.
  Tokens c;
  c.pending = std::span<const std::uint64_t>(wide).first(4);
  c.narrow = std::span<const std::uint32_t>(truncated).subspan(4);
  EXPECT_EQ(chain(a, 8), chain(c, 8));
}

TEST(Hash, ExtraChangesItsLinkAndAllAfter) {
  std::vector<std::uint32_t> ids(64, 7);
  Tokens t;
  t.narrow = ids;
  Digest digest{};
  digest.fill(9);
  const Extra extra{1, digest.data()};
  const auto plain = chain(t, 16);
  const auto with = chain(t, 16, {&extra, 1});
  for (std::size_t i = 0; i < 4; ++i) {
    const auto at = i * kDigestBytes;
    EXPECT_EQ(hex(&plain[at], kDigestBytes) == hex(&with[at], kDigestBytes), i == 0) << i;
  }
}

TEST(Hash, IdsOfStridedLinks) {
  std::vector<std::uint32_t> ids(64, 7);
  Tokens t;
  t.narrow = ids;
  const auto links = chain(t, 16);
  Digest seed{};
  std::vector<std::uint8_t> all(4 * kIdBytes), odd(2 * kIdBytes), snap(2 * kIdBytes);
  object_ids(seed, links.data(), kDigestBytes, 4, all.data());
  object_ids(seed, links.data() + kDigestBytes, 2 * kDigestBytes, 2, odd.data());
  EXPECT_EQ(hex(&odd[0], kIdBytes), hex(&all[kIdBytes], kIdBytes));
  EXPECT_EQ(hex(&odd[kIdBytes], kIdBytes), hex(&all[3 * kIdBytes], kIdBytes));
  const std::vector<std::uint64_t> positions{32, 64};
  snapshot_ids(seed, links.data() + kDigestBytes, 2 * kDigestBytes, positions, snap.data());
  EXPECT_NE(hex(&snap[0], kIdBytes), hex(&odd[0], kIdBytes));
}

}  // namespace
}  // namespace ucm::hash
