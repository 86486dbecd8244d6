// The list of cache formats. A format says how one cached token lies in memory.
#pragma once

#include <cstdint>

namespace flashmla {

enum class KvFormat : std::int32_t {
#define FLASHMLA_KV_FORMAT(id, name, header) id,
#include "kv/formats.inc"
#undef FLASHMLA_KV_FORMAT
};

constexpr const char* kv_format_name(KvFormat format) {
  switch (format) {
#define FLASHMLA_KV_FORMAT(id, name, header) \
  case KvFormat::id:                         \
    return name;
#include "kv/formats.inc"
#undef FLASHMLA_KV_FORMAT
  }
  return "unknown cache format";
}

}  // namespace flashmla
