// A layout descriptor of whatever text, as the header of somebody else's file may hold it: refused, or in
// canonical form and convertible within its bounds.
#include "ucm/layout.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>

#include "target.h"
#include "ucm/geometry.h"

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ucm;
  const std::string text(reinterpret_cast<const char*>(data), size);
  std::string error;
  const auto layout = Layout::parse(text, error);
  if (!layout) {
    if (error.empty()) __builtin_trap();  // a refusal says why
    return 0;
  }
  const auto again = Layout::parse(layout->text(), error);
  if (!again || !(*again == *layout)) __builtin_trap();
  if (layout->total_bytes() > 65'536 || layout->shard_count() > 64) return 0;
  static const Layout target = *Layout::parse("bf16|token:4@16,kv:2,token:16,head:2,elem:8", error);
  for (const Layout* to : {&*layout, &target}) {
    for (const std::uint64_t align : {std::uint64_t{1}, std::uint64_t{kIoAlign}}) {
      const auto plan = Conversion::plan(*layout, *to, align, 1, error);
      if (!plan) continue;
      // Exactly as large as announced: what reaches outside is seen.
      const std::unique_ptr<std::byte[]> from(new std::byte[plan->source_bytes()]());
      const std::unique_ptr<std::byte[]> into(new std::byte[plan->target_bytes()]());
      plan->run(into.get(), from.get(), 0, plan->target_shards());
    }
  }
  return 0;
}
