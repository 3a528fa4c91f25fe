// Rules that carry a state, in chunks: linear attention with decay, and the gated delta rule (see `gated_delta/chunked`
// for the formulas), float32, a head at a time, so that all of a chunk stays in the processor's caches.
//
// The backward pass finds the states before the chunks again from what tokens wrote, u, and goes back over them. With D
// for gradients, and P and A for what queries read of tokens and tokens of each other:
//     Du = P^T Dout + left k DS';   Dr = (I + A)^-T Du;   Dv = beta Dr
//     Dq = entered Dout S^T + DP k;   x = -entered Dr S^T - (Dr u^T decay) k;   Dbeta = Dr v + k x
//     Dk = beta x + y,   y = DP^T q - (beta Dr u^T decay)^T k + left u DS'^T
// The sum of the decays up to a token multiplies q and the k of x, and divides the k of y; the last one of a chunk, the
// state behind it: so its gradient is q Dq + k (beta x - y), and DS' S' for the last one.

#include "recurrent.h"

namespace te_models {

struct Operands {
  const float *q, *k, *v, *g, *beta, *initial;  // beta: null where tokens write v itself; initial: may be null
};

struct Forward {
  const Shape& s;
  int64_t K = up_to(s.K, kAcross), V_ = up_to(s.V, kAcross);
  Buffer q = buffer(kChunk * K), k = buffer(kChunk * K), across = buffer(K * kChunk), u = buffer(kChunk * V_);
  Buffer reads = buffer(kChunk * kChunk), system = buffer(kChunk * kChunk), state = buffer(K * V_);
  Buffer y = buffer(kChunk * V_);
  Decay decay;
  explicit Forward(const Shape& shape) : s(shape) {}

  void head(const Operands& x, int64_t document, int64_t h, float* out, float* written, float* behind) {
    const int64_t own = document * s.H + h, of_keys = s.key_heads() * s.K, of_values = s.H * s.V;
    for (int64_t c = 0; c < K; ++c)
      for (int64_t d = 0; d < V_; ++d)
        state[c * V_ + d] = x.initial != nullptr && c < s.K && d < s.V ? x.initial[(own * s.K + c) * s.V + d] : 0.0f;
    for (const auto& [at, count] : s.chunks(document)) {
      if (s.anew(at)) std::fill_n(state.get(), K * V_, 0.0f);
      const int64_t rows = up_to(count, kTall), of_q = at * of_keys + h / s.shared * s.K,
                    of_v = at * of_values + h * s.V;
      copy_rows(x.q + of_q, of_keys, count, s.K, K, q.get());
      copy_rows(x.k + of_q, of_keys, count, s.K, K, k.get());
      copy_rows(x.v + of_v, of_values, count, s.V, V_, u.get());
      decay.read(x.g + at * s.H + h, x.beta == nullptr ? nullptr : x.beta + at * s.H + h, s.H, count, rows);
      transposed(k.get(), kChunk, K, K, across.get(), kChunk);
      float scales[kChunk], entered[kChunk];
      for (int64_t i = 0; i < kChunk; ++i) scales[i] = s.scale, entered[i] = s.scale * decay.entered[i];
      weigh(q.get(), K, across.get(), K, decay.pairs, scales, rows, reads.get());
      if (x.beta != nullptr) write_corrections(rows);
      product(
          rows, V_,
          [&](int64_t r, int64_t c, Sums& sums) INLINE {
            add(q.get(), K, 1, state.get(), V_, r, c, 0, K, sums);
            times(entered + r, sums);
            add(reads.get(), kChunk, 1, u.get(), V_, r, c, 0, r + kTall, sums);
          },
          [&](int64_t r, int64_t c, Sums& sums) INLINE { put(y.get(), V_, r, c, sums); });
      for (int64_t i = 0; i < count; ++i) {
        std::copy_n(y.get() + i * V_, s.V, out + of_v + i * of_values);
        if (written != nullptr) std::copy_n(u.get() + i * V_, s.V, written + of_v + i * of_values);
      }
      scale_rows(k.get(), rows, K, decay.left);
      product(
          K, V_, [&](int64_t r, int64_t c, Sums& sums) INLINE { add(k.get(), 1, K, u.get(), V_, r, c, 0, rows, sums); },
          [&](int64_t r, int64_t c, Sums& sums) INLINE { put_decayed(state.get(), V_, r, c, decay.passed, sums); });
    }
    for (int64_t c = 0; c < s.K; ++c) std::copy_n(state.get() + c * V_, s.V, behind + (own * s.K + c) * s.V);
  }

  // u = (I + A)^-1 beta (v - entered k S)
  void write_corrections(int64_t rows) {
    weigh(k.get(), K, across.get(), K, decay.pairs, decay.beta, rows, system.get());
    product(
        rows, V_,
        [&](int64_t r, int64_t c, Sums& sums) INLINE { add(k.get(), K, 1, state.get(), V_, r, c, 0, K, sums); },
        [&](int64_t r, int64_t c, Sums& sums) INLINE {
          Sums value;
          take(u.get(), V_, r, c, value);
          for (int i = 0; i < kTall; ++i)
            for (int v = 0; v < 2; ++v) {
              const Floats error = fma(all(-decay.entered[r + i]), sums[i][v], value[i][v]);
              sums[i][v] = mul(all(decay.beta[r + i]), error);
            }
          put(u.get(), V_, r, c, sums);
        });
    solve(system.get(), u.get(), rows, V_);
  }
};

struct Gradients {
  float *q, *k, *v, *g, *beta, *initial;  // q and k: zeros, which all heads of v are added to
};

struct Backward {
  const Shape& s;
  int64_t K = up_to(s.K, kAcross), V_ = up_to(s.V, kAcross);
  Buffer q = buffer(kChunk * K), k = buffer(kChunk * K), across = buffer(std::max(K, V_) * kChunk);
  Buffer u = buffer(kChunk * V_), v = buffer(kChunk * V_), dy = buffer(kChunk * V_), dr = buffer(kChunk * V_);
  Buffer reads = buffer(kChunk * kChunk), system = buffer(kChunk * kChunk);
  Buffer dq = buffer(kChunk * K), x = buffer(kChunk * K), y = buffer(kChunk * K);
  Buffer dstate = buffer(K * V_), dstate_across = buffer(K * V_), states;  // across, and states: [V][K]
  Decay decay;
  explicit Backward(const Shape& shape) : s(shape) {}

  void head(const Operands& given, const float* written, const float* grad, const float* grad_behind, int64_t document,
            int64_t h, const Gradients& to) {
    const auto chunks = s.chunks(document);
    const int64_t own = document * s.H + h;
    find_states(given, written, chunks, h, own);
    for (int64_t c = 0; c < K; ++c)
      for (int64_t d = 0; d < V_; ++d)
        dstate[c * V_ + d] = c < s.K && d < s.V ? grad_behind[(own * s.K + c) * s.V + d] : 0.0f;
    for (int64_t n = int64_t(chunks.size()) - 1; n >= 0; --n) {
      const auto [at, count] = chunks[n];
      chunk(given, written, grad, at, count, h, states.get() + n * K * V_, to);
      if (s.anew(at)) std::fill_n(dstate.get(), K * V_, 0.0f);
    }
    for (int64_t c = 0; c < s.K; ++c) std::copy_n(dstate.get() + c * V_, s.V, to.initial + (own * s.K + c) * s.V);
  }

  // the states before the chunks, and behind the last one
  void find_states(const Operands& given, const float* written, const std::vector<std::pair<int64_t, int64_t>>& chunks,
                   int64_t h, int64_t own) {
    states = buffer((int64_t(chunks.size()) + 1) * K * V_);
    float* state = states.get();
    for (int64_t d = 0; d < V_; ++d)
      for (int64_t c = 0; c < K; ++c)
        state[d * K + c] =
            given.initial != nullptr && c < s.K && d < s.V ? given.initial[(own * s.K + c) * s.V + d] : 0.0f;
    for (const auto& [at, count] : chunks) {
      if (s.anew(at)) std::fill_n(state, K * V_, 0.0f);
      const int64_t rows = up_to(count, kTall);
      copy_rows(given.k + (at * s.key_heads() + h / s.shared) * s.K, s.key_heads() * s.K, count, s.K, K, k.get());
      copy_rows(written + (at * s.H + h) * s.V, s.H * s.V, count, s.V, V_, u.get());
      decay.read(given.g + at * s.H + h, nullptr, s.H, count, 0);
      scale_rows(k.get(), rows, K, decay.left);
      float* const next = state + K * V_;
      std::copy_n(state, K * V_, next);
      product(
          V_, K, [&](int64_t r, int64_t c, Sums& sums) INLINE { add(u.get(), 1, V_, k.get(), K, r, c, 0, rows, sums); },
          [&](int64_t r, int64_t c, Sums& sums) INLINE { put_decayed(next, K, r, c, decay.passed, sums); });
      state = next;
    }
  }

  // state: before the chunk, and then the one behind it
  void chunk(const Operands& given, const float* written, const float* grad, int64_t at, int64_t count, int64_t h,
             const float* state, const Gradients& to) {
    const bool corrects = given.beta != nullptr;
    const int64_t rows = up_to(count, kTall), of_keys = s.key_heads() * s.K, of_values = s.H * s.V;
    const int64_t at_q = at * of_keys + h / s.shared * s.K, at_v = at * of_values + h * s.V;
    copy_rows(given.q + at_q, of_keys, count, s.K, K, q.get());
    copy_rows(given.k + at_q, of_keys, count, s.K, K, k.get());
    copy_rows(written + at_v, of_values, count, s.V, V_, u.get());
    copy_rows(grad + at_v, of_values, count, s.V, V_, dy.get());
    decay.read(given.g + at * s.H + h, corrects ? given.beta + at * s.H + h : nullptr, s.H, count, rows);
    float scales[kChunk], entered[kChunk], minus[kChunk], by_beta[kChunk];
    for (int64_t i = 0; i < kChunk; ++i) {
      scales[i] = s.scale, entered[i] = s.scale * decay.entered[i], minus[i] = -decay.entered[i];
      by_beta[i] = decay.beta[i] * minus[i];
    }
    transposed(k.get(), kChunk, K, K, across.get(), kChunk);
    weigh(q.get(), K, across.get(), K, decay.pairs, scales, rows, reads.get());
    if (corrects) weigh(k.get(), K, across.get(), K, decay.pairs, decay.beta, rows, system.get());
    transposed(dstate.get(), K, V_, V_, dstate_across.get(), K);

    product(
        rows, V_,
        [&](int64_t r, int64_t c, Sums& sums) INLINE {
          add(k.get(), K, 1, dstate.get(), V_, r, c, 0, K, sums);
          times(decay.left + r, sums);
          add(reads.get(), 1, kChunk, dy.get(), V_, r, c, r, rows, sums);
        },
        [&](int64_t r, int64_t c, Sums& sums) INLINE { put(dr.get(), V_, r, c, sums); });
    if (corrects) solve_transposed(system.get(), dr.get(), rows, V_);
    for (int64_t i = 0; i < count; ++i)
      for (int64_t d = 0; d < s.V; ++d)
        to.v[at_v + i * of_values + d] = corrects ? decay.beta[i] * dr[i * V_ + d] : dr[i * V_ + d];

    transposed(u.get(), kChunk, V_, V_, across.get(), kChunk);
    weigh(dy.get(), V_, across.get(), V_, decay.pairs, scales, rows, reads.get());
    if (corrects) {
      float ones[kChunk];
      std::fill_n(ones, kChunk, -1.0f);
      weigh(dr.get(), V_, across.get(), V_, decay.pairs, ones, rows, system.get());
      for (int64_t i = 0; i < rows; ++i) system[i * kChunk + i] = 0.0f;
    }
    const auto of_tokens = [&](const float* values, const float* factors, const float* pairs, float* found) {
      product(
          rows, K,
          [&](int64_t r, int64_t c, Sums& sums) INLINE {
            add(values, V_, 1, state, K, r, c, 0, V_, sums);
            times(factors + r, sums);
            add(pairs, kChunk, 1, k.get(), K, r, c, 0, r + kTall, sums);
          },
          [&](int64_t r, int64_t c, Sums& sums) INLINE { put(found, K, r, c, sums); });
    };
    of_tokens(dy.get(), entered, reads.get(), dq.get());
    if (corrects) {
      of_tokens(dr.get(), minus, system.get(), x.get());
      scale_rows(system.get(), rows, kChunk, decay.beta);
    }
    product(
        rows, K,
        [&](int64_t r, int64_t c, Sums& sums) INLINE {
          add(u.get(), V_, 1, dstate_across.get(), K, r, c, 0, V_, sums);
          times(decay.left + r, sums);
          add(reads.get(), 1, kChunk, q.get(), K, r, c, r, rows, sums);
          if (corrects) add(system.get(), 1, kChunk, k.get(), K, r, c, r, rows, sums);
        },
        [&](int64_t r, int64_t c, Sums& sums) INLINE { put(y.get(), K, r, c, sums); });
    if (corrects) copy_rows(given.v + at_v, of_values, count, s.V, V_, v.get());
    double of_total = dot_rows(dstate_across.get(), state + K * V_, K * V_);
    for (int64_t i = count - 1; i >= 0; --i) {
      const float* const key = k.get() + i * K;
      float* const of_k = to.k + at_q + i * of_keys;
      of_total += dot_rows(q.get() + i * K, dq.get() + i * K, K) - dot_rows(key, y.get() + i * K, K);
      if (corrects) {
        const float found = dot_rows(key, x.get() + i * K, K);
        of_total += decay.beta[i] * found;
        to.beta[(at + i) * s.H + h] = found + dot_rows(v.get() + i * V_, dr.get() + i * V_, V_);
        for (int64_t c = 0; c < s.K; ++c) of_k[c] += decay.beta[i] * x[i * K + c];
      }
      for (int64_t c = 0; c < s.K; ++c) of_k[c] += y[i * K + c], to.q[at_q + i * of_keys + c] += dq[i * K + c];
      to.g[(at + i) * s.H + h] = float(of_total);
    }

    scale_rows(q.get(), rows, K, entered);
    if (corrects) scale_rows(k.get(), rows, K, by_beta);
    product(
        K, V_,
        [&](int64_t r, int64_t c, Sums& sums) INLINE {
          add(q.get(), 1, K, dy.get(), V_, r, c, 0, rows, sums);
          if (corrects) add(k.get(), 1, K, dr.get(), V_, r, c, 0, rows, sums);
        },
        [&](int64_t r, int64_t c, Sums& sums) INLINE { put_decayed(dstate.get(), V_, r, c, decay.passed, sums); });
  }
};

}  // namespace te_models
using namespace te_models;

// pointers: q, k, v, g, beta or null, initial states or null, starts or null, ends or null, and then out, u or null and
// the states behind; sizes: see `Shape`
extern "C" void te_recurrent_forward(void* const* pointers, const int64_t* sizes, float scale, int threads) {
  const auto at = [&](int i) { return static_cast<float*>(pointers[i]); };
  const Shape s(pointers[6], pointers[7], sizes, scale);
  const Operands x{at(0), at(1), at(2), at(3), at(4), at(5)};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const WithoutSubnormals flushed;
    Forward forward(s);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < s.M * s.H; ++i) forward.head(x, i / s.H, i % s.H, at(8), at(9), at(10));
  }
}

// pointers: as before, then u, the gradients of out and of the states behind, and the gradients to find, as
// `Gradients`, of q and k `parts` times, one for each part of the heads that share one
extern "C" void te_recurrent_backward(void* const* pointers, const int64_t* sizes, float scale, int64_t parts,
                                      int threads) {
  const auto at = [&](int i) { return static_cast<float*>(pointers[i]); };
  const Shape s(pointers[6], pointers[7], sizes, scale);
  const Operands x{at(0), at(1), at(2), at(3), at(4), at(5)};
  const int64_t share = (s.shared + parts - 1) / parts, of_part = s.B * s.T * s.key_heads() * s.K;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const WithoutSubnormals flushed;
    Backward backward(s);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < s.M * s.key_heads() * parts; ++i) {
      const int64_t part = i % parts, head = i / parts % s.key_heads() * s.shared, document = i / parts / s.key_heads();
      const Gradients to{at(11) + part * of_part, at(12) + part * of_part, at(13), at(14), at(15), at(16)};
      for (int64_t h = part * share; h < std::min((part + 1) * share, s.shared); ++h)
        backward.head(x, at(8), at(9), at(10), document, head + h, to);
    }
  }
}
