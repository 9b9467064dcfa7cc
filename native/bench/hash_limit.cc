// SHA-256 over a chain of links, nothing else: what hashing a prompt cannot beat.
#include <openssl/evp.h>

#include <array>
#include <memory>
#include <vector>

#include "meter.h"

namespace ucm::bench {

Report hash_chain(const Args& args) {
  const std::size_t block_tokens = args.number("block_tokens");
  const std::size_t links = args.number("tokens") / block_tokens;
  std::vector<std::uint32_t> tokens(links * block_tokens);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<std::uint32_t>(i * 2654435761u % 100'000u);
  }
  const std::unique_ptr<EVP_MD, decltype(&EVP_MD_free)> sha(
      EVP_MD_fetch(nullptr, "SHA256", nullptr), EVP_MD_free);
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(),
                                                                        EVP_MD_CTX_free);
  if (!sha || !context) throw std::runtime_error("OpenSSL has no SHA-256");
  std::array<unsigned char, 32> link{};
  bool ok = true;
  const Meter meter;
  for (std::size_t i = 0; i < links; ++i) {
    ok = ok && EVP_DigestInit_ex2(context.get(), sha.get(), nullptr) == 1;
    if (i > 0) ok = ok && EVP_DigestUpdate(context.get(), link.data(), link.size()) == 1;
    ok = ok && EVP_DigestUpdate(context.get(), tokens.data() + i * block_tokens,
                                block_tokens * sizeof(std::uint32_t)) == 1;
    ok = ok && EVP_DigestFinal_ex(context.get(), link.data(), nullptr) == 1;
  }
  const Cost cost = meter.stop();
  if (!ok) throw std::runtime_error("SHA-256 failed");
  return {cost, links, tokens.size() * sizeof(std::uint32_t)};
}

}  // namespace ucm::bench
