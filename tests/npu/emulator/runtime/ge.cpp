// Strings, initialisation and graphs of GE as torchair's export needs them. A graph is the serialised model that it was
// loaded from; saving writes that. Nothing is compiled or run.
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>
namespace ge {
class AscendString {
 public:
  AscendString() = default;
  AscendString(const char *text);
  bool operator<(const AscendString &other) const;
  bool operator==(const AscendString &other) const;
  const char *GetString() const;
 private:
  std::shared_ptr<std::string> name_;
};
AscendString::AscendString(const char *text) : name_(text ? std::make_shared<std::string>(text) : nullptr) {}
const char *AscendString::GetString() const { return name_ ? name_->c_str() : ""; }
bool AscendString::operator<(const AscendString &other) const { return std::string(GetString()) < other.GetString(); }
bool AscendString::operator==(const AscendString &other) const { return std::string(GetString()) == other.GetString(); }
uint32_t GEInitialize(const std::map<AscendString, AscendString> &) { return 0; }
uint32_t GEFinalize() { return 0; }
AscendString GEGetWarningMsgV2() { return AscendString(""); }
AscendString GEGetErrorMsg() { return AscendString(""); }

class GNode { std::shared_ptr<void> impl_; };
class Graph {
 public:
  explicit Graph(const char *name);
  uint32_t LoadFromSerializedModelArray(const void *model, size_t size);
  uint32_t SaveToFile(const char *path) const;
  std::vector<GNode> GetAllNodes() const;
 private:
  std::shared_ptr<std::string> model_;
};
Graph::Graph(const char *) {}
uint32_t Graph::LoadFromSerializedModelArray(const void *model, size_t size) {
  model_ = std::make_shared<std::string>(static_cast<const char *>(model), size);
  return 0;
}
uint32_t Graph::SaveToFile(const char *path) const {
  FILE *file = model_ ? std::fopen(path, "wb") : nullptr;
  if (!file) return 1;
  const bool whole = std::fwrite(model_->data(), 1, model_->size(), file) == model_->size();
  return std::fclose(file) || !whole;
}
std::vector<GNode> Graph::GetAllNodes() const { return {}; }
}  // namespace ge
