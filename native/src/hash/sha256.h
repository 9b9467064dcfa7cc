// A SHA-256 context on the stack, without the per-digest set-up of OpenSSL's EVP layer.
#pragma once

// The low-level functions are marked deprecated in OpenSSL 3 in favour of EVP, whose set-up costs
// more than hashing the 64..288 bytes of a link. They stay supported and use the same assembly.
#define OPENSSL_SUPPRESS_DEPRECATED
#include <openssl/sha.h>

#include <cstddef>
#include <cstdint>

namespace ucm::hash {

class Sha256 {
 public:
  Sha256() noexcept { SHA256_Init(&ctx_); }
  Sha256& update(const void* data, std::size_t n) noexcept {
    SHA256_Update(&ctx_, data, n);
    return *this;
  }
  void finish(std::uint8_t* out) noexcept { SHA256_Final(out, &ctx_); }

 private:
  SHA256_CTX ctx_;
};

}  // namespace ucm::hash
