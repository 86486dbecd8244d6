// The definition in double precision, written from its formula and sharing no code with src/.
#pragma once

#include <vector>

#include "support/decode_case.hpp"

namespace flashmla::testing {

struct Expected {
  std::vector<double> out;  // (batch, seq_len_q, num_heads_q, head_dim_v)
  std::vector<double> lse;  // (batch, num_heads_q, seq_len_q)
};

Expected evaluate(const DecodeCase& decode_case);

// outs (parts, batch, seq_len_q, num_heads_q, head_dim_v), lses (parts, batch, num_heads_q,
// seq_len_q).
Expected evaluate_merge(const Array& outs, const Array& lses);

}  // namespace flashmla::testing
