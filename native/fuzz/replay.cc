// Runs a target where there is no libFuzzer: every file of a corpus, then random changes of them for some
// seconds. Weaker than coverage-guided fuzzing, but the same code under the same checks.
//
//   <target> -max_total_time=SECONDS [-seed=N] CORPUS_DIRECTORY...      (as libFuzzer takes them)
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "target.h"

int main(int argc, char** argv) {
  using Bytes = std::vector<std::uint8_t>;
  std::vector<Bytes> corpus;
  int seconds = 0;
  std::mt19937_64 random(1);
  for (int i = 1; i < argc; ++i) {
    if (std::sscanf(argv[i], "-max_total_time=%d", &seconds) == 1) continue;
    if (unsigned long long seed = 0; std::sscanf(argv[i], "-seed=%llu", &seed) == 1) {
      random.seed(seed);
      continue;
    }
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      std::ifstream in(entry.path(), std::ios::binary);
      corpus.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    }
  }
  if (corpus.empty()) {
    std::fprintf(stderr, "usage: %s -max_total_time=SECONDS [-seed=N] CORPUS_DIRECTORY...\n",
                 argv[0]);
    return 2;
  }
  for (const Bytes& input : corpus) (void)LLVMFuzzerTestOneInput(input.data(), input.size());
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  std::uint64_t runs = corpus.size();
  for (; std::chrono::steady_clock::now() < end; ++runs) {
    Bytes input = corpus[random() % corpus.size()];
    for (std::uint64_t n = 1 + random() % 8; n > 0; --n) {
      const std::uint64_t how = random() % 8;
      if (how == 0 && input.size() < 16'384) {
        input.insert(input.begin() + static_cast<std::ptrdiff_t>(random() % (input.size() + 1)),
                     static_cast<std::uint8_t>(random()));
      } else if (how == 1 && !input.empty()) {
        input.erase(input.begin() + static_cast<std::ptrdiff_t>(random() % input.size()));
      } else if (how == 2 && !input.empty()) {
        input.resize(random() % input.size() + 1);
      } else if (how == 3) {
        const Bytes& other = corpus[random() % corpus.size()];
        const std::size_t cut = other.empty() ? 0 : random() % other.size();
        input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(cut), other.end());
      } else if (!input.empty()) {
        input[random() % input.size()] = static_cast<std::uint8_t>(random());
      }
    }
    (void)LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%s: %zu files, %llu inputs\n", argv[0], corpus.size(),
              static_cast<unsigned long long>(runs));
  return 0;
}
