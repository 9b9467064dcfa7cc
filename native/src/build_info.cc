// Placeholder translation unit until the parts land; names the compiled layout version.
namespace ucm {
extern const int kBuildLayoutVersion;
const int kBuildLayoutVersion = 1;
}  // namespace ucm
