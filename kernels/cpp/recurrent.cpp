// Rules that carry a state, in chunks: linear attention with decay, and the gated delta rule (see `gated_delta/chunked`
// for the formulas), float32, a head at a time, so that all of a chunk stays in the processor's caches.
//
// The backward pass finds the states before the chunks again from what tokens wrote, u, and goes back over them. With D
// for gradients, and P and A for what queries read of tokens and tokens of each other:
//     Du = P^T Dout + left k DS';   Dr = (I + A)^-T Du;   Dv = beta Dr
//     Dq = entered Dout S^T + DP k;   x = -entered Dr S^T - (Dr u^T decay) k;   Dbeta = Dr v + k x
//     Dk = beta x + y,   y = DP^T q - (beta Dr u^T decay)^T k + left u DS'^T
// The sum of the decays up to a token multiplies q and the k of x, and divides the k of y; the last one of a chunk, the
// state behind it: so its gradient is q Dq + k (beta x - y), and DS' S' for the last one. Where each channel of keys
// decays, these are products channel by channel.

#include "recurrent_decay.h"

namespace te_models {

struct Operands {
  const float *q, *k, *v, *g, *beta, *initial;  // beta: null where tokens write v itself; initial: may be null
};

// beta of each token of a chunk, times a factor; zeros behind the last one, and where tokens write v itself
inline void read_beta(const Operands& x, const Shape& s, int64_t at, int64_t count, int64_t h, float factor,
                      float* to) {
  for (int64_t i = 0; i < kChunk; ++i)
    to[i] = i < count && x.beta != nullptr ? factor * x.beta[(at + i) * s.H + h] : 0.0f;
}

template <class Decay>
struct Forward {
  const Shape& s;
  int64_t K = up_to(s.K, kAcross), V_ = up_to(s.V, kAcross), of_g = Decay::width(s);
  Buffer q = buffer(kChunk * K), k = buffer(kChunk * K), decayed = buffer(kChunk * K), u = buffer(kChunk * V_);
  Buffer reads = buffer(kChunk * kChunk), system = buffer(kChunk * kChunk), state = buffer(K * V_);
  Buffer y = buffer(kChunk * V_);
  Decay decay{K};
  float scales[kChunk], beta[kChunk], minus_beta[kChunk];
  explicit Forward(const Shape& shape) : s(shape) { std::fill_n(scales, kChunk, s.scale); }

  void head(const Operands& x, int64_t document, int64_t h, float* out, float* written, float* behind) {
    const int64_t own = document * s.H + h, of_keys = s.key_heads() * s.K, of_values = s.H * s.V;
    for (int64_t c = 0; c < K; ++c)
      for (int64_t d = 0; d < V_; ++d)
        state[c * V_ + d] = x.initial != nullptr && c < s.K && d < s.V ? x.initial[(own * s.K + c) * s.V + d] : 0.0f;
    for (const auto& [at, count] : s.chunks(document)) {
      if (s.anew(at)) std::fill_n(state.get(), K * V_, 0.0f);
      const int64_t rows = up_to(count, kBlock), of_q = at * of_keys + h / s.shared * s.K,
                    of_v = at * of_values + h * s.V;
      copy_rows(x.q + of_q, of_keys, count, s.K, K, q.get());
      copy_rows(x.k + of_q, of_keys, count, s.K, K, k.get());
      copy_rows(x.v + of_v, of_values, count, s.V, V_, u.get());
      decay.read(x.g + (at * s.H + h) * of_g, s.H * of_g, count, s.K, rows);
      read_beta(x, s, at, count, h, 1.0f, beta);
      read_beta(x, s, at, count, h, -1.0f, minus_beta);
      decay.weigh(q.get(), k.get(), rows, scales, beta, reads.get(), x.beta == nullptr ? nullptr : system.get());
      if (x.beta != nullptr) write_corrections(rows);
      enter(decay, q.get(), scales, rows, decayed.get());
      product(
          rows, V_,
          [&](int64_t r, int64_t c, Sums& sums) INLINE {
            add(decayed.get(), K, 1, state.get(), V_, r, c, 0, K, sums);
            add(reads.get(), kChunk, 1, u.get(), V_, r, c, 0, r + kTall, sums);
          },
          [&](int64_t r, int64_t c, Sums& sums) INLINE { put(y.get(), V_, r, c, sums); });
      for (int64_t i = 0; i < count; ++i) {
        std::copy_n(y.get() + i * V_, s.V, out + of_v + i * of_values);
        if (written != nullptr) std::copy_n(u.get() + i * V_, s.V, written + of_v + i * of_values);
      }
      leave(decay, k.get(), rows, decayed.get());
      product(
          K, V_,
          [&](int64_t r, int64_t c, Sums& sums) INLINE { add(decayed.get(), 1, K, u.get(), V_, r, c, 0, rows, sums); },
          [&](int64_t r, int64_t c, Sums& sums)
              INLINE { put_decayed_rows(state.get(), V_, r, c, decay.passed.get(), sums); });
    }
    for (int64_t c = 0; c < s.K; ++c) std::copy_n(state.get() + c * V_, s.V, behind + (own * s.K + c) * s.V);
  }

  // u = (I + A)^-1 beta (v - entered k S)
  void write_corrections(int64_t rows) {
    enter(decay, k.get(), minus_beta, rows, decayed.get());
    product(
        rows, V_,
        [&](int64_t r, int64_t c, Sums& sums) INLINE {
          take(u.get(), V_, r, c, sums);
          times(beta + r, sums);
          add(decayed.get(), K, 1, state.get(), V_, r, c, 0, K, sums);
        },
        [&](int64_t r, int64_t c, Sums& sums) INLINE { put(u.get(), V_, r, c, sums); });
    solve(system.get(), u.get(), rows, V_);
  }
};

struct Gradients {
  float *q, *k, *v, *g, *beta, *initial;  // q and k: zeros, which all heads of v are added to
};

template <class Decay>
struct Backward {
  const Shape& s;
  int64_t K = up_to(s.K, kAcross), V_ = up_to(s.V, kAcross), of_g = Decay::width(s);
  Buffer q = buffer(kChunk * K), k = buffer(kChunk * K), decayed = buffer(kChunk * K), across = buffer(V_ * kChunk);
  Buffer u = buffer(kChunk * V_), v = buffer(kChunk * V_), dy = buffer(kChunk * V_), dr = buffer(kChunk * V_);
  Buffer reads = buffer(kChunk * kChunk), system = buffer(kChunk * kChunk);
  Buffer dq = buffer(kChunk * K), x = buffer(kChunk * K), y = buffer(kChunk * K);
  Buffer dstate = buffer(K * V_), dstate_across = buffer(K * V_), states;  // across, and states: [V][K]
  Decay decay{K};
  float scales[kChunk], minus[kChunk], beta[kChunk], minus_beta[kChunk];
  explicit Backward(const Shape& shape) : s(shape) {
    std::fill_n(scales, kChunk, s.scale);
    std::fill_n(minus, kChunk, -1.0f);
  }

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
      const int64_t rows = up_to(count, kBlock);
      copy_rows(given.k + (at * s.key_heads() + h / s.shared) * s.K, s.key_heads() * s.K, count, s.K, K, k.get());
      copy_rows(written + (at * s.H + h) * s.V, s.H * s.V, count, s.V, V_, u.get());
      decay.read(given.g + (at * s.H + h) * of_g, s.H * of_g, count, s.K, rows);
      leave(decay, k.get(), rows, decayed.get());
      float* const next = state + K * V_;
      std::copy_n(state, K * V_, next);
      product(
          V_, K,
          [&](int64_t r, int64_t c, Sums& sums) INLINE { add(u.get(), 1, V_, decayed.get(), K, r, c, 0, rows, sums); },
          [&](int64_t r, int64_t c, Sums& sums)
              INLINE { put_decayed_columns(next, K, r, c, decay.passed.get(), sums); });
      state = next;
    }
  }

  // state: before the chunk, and then the one behind it
  void chunk(const Operands& given, const float* written, const float* grad, int64_t at, int64_t count, int64_t h,
             const float* state, const Gradients& to) {
    const bool corrects = given.beta != nullptr;
    const int64_t rows = up_to(count, kBlock), of_keys = s.key_heads() * s.K, of_values = s.H * s.V;
    const int64_t at_q = at * of_keys + h / s.shared * s.K, at_v = at * of_values + h * s.V;
    const int64_t at_g = (at * s.H + h) * of_g;
    copy_rows(given.q + at_q, of_keys, count, s.K, K, q.get());
    copy_rows(given.k + at_q, of_keys, count, s.K, K, k.get());
    copy_rows(written + at_v, of_values, count, s.V, V_, u.get());
    copy_rows(grad + at_v, of_values, count, s.V, V_, dy.get());
    decay.read(given.g + at_g, s.H * of_g, count, s.K, rows);
    read_beta(given, s, at, count, h, 1.0f, beta);
    read_beta(given, s, at, count, h, -1.0f, minus_beta);
    decay.weigh(q.get(), k.get(), rows, scales, beta, reads.get(), corrects ? system.get() : nullptr);
    transposed(dstate.get(), K, V_, V_, dstate_across.get(), K);

    leave(decay, k.get(), rows, decayed.get());
    product(
        rows, V_,
        [&](int64_t r, int64_t c, Sums& sums) INLINE {
          add(decayed.get(), K, 1, dstate.get(), V_, r, c, 0, K, sums);
          add(reads.get(), 1, kChunk, dy.get(), V_, r, c, r, rows, sums);
        },
        [&](int64_t r, int64_t c, Sums& sums) INLINE { put(dr.get(), V_, r, c, sums); });
    if (corrects) solve_transposed(system.get(), dr.get(), rows, V_);
    for (int64_t i = 0; i < count; ++i)
      for (int64_t d = 0; d < s.V; ++d)
        to.v[at_v + i * of_values + d] = corrects ? beta[i] * dr[i * V_ + d] : dr[i * V_ + d];

    transposed(u.get(), kChunk, V_, V_, across.get(), kChunk);
    multiply_pairs(dy.get(), V_, across.get(), V_, decay.pairs, scales, rows, reads.get());
    if (corrects) {
      multiply_pairs(dr.get(), V_, across.get(), V_, decay.pairs, minus, rows, system.get());
      for (int64_t i = 0; i < rows; ++i) system[i * kChunk + i] = 0.0f;
    }
    // values times rows of a state, decayed, and factors
    const auto of_state = [&](const float* values, const float* rows_of_state, const float* factors, bool leaves,
                              float* found) {
      product(
          rows, K,
          [&](int64_t r, int64_t c, Sums& sums) INLINE {
            add(values, V_, 1, rows_of_state, K, r, c, 0, V_, sums);
            for (int i = 0; i < kTall; ++i)
              for (int w = 0; w < 2; ++w) {
                const int64_t column = c + w * kLanes;
                sums[i][w] = mul(sums[i][w], leaves ? decay.left_at(r + i, column) : decay.entered_at(r + i, column));
              }
            if (factors != nullptr) times(factors + r, sums);
          },
          [&](int64_t r, int64_t c, Sums& sums) INLINE { put(found, K, r, c, sums); });
    };
    of_state(dy.get(), state, scales, false, dq.get());
    decay.add_before(reads.get(), k.get(), rows, dq.get());
    of_state(u.get(), dstate_across.get(), nullptr, true, y.get());
    decay.add_behind(reads.get(), q.get(), rows, y.get());
    if (corrects) {
      of_state(dr.get(), state, minus, false, x.get());
      decay.add_before(system.get(), k.get(), rows, x.get());
      scale_rows(system.get(), rows, kChunk, beta);
      decay.add_behind(system.get(), k.get(), rows, y.get());
      copy_rows(given.v + at_v, of_values, count, s.V, V_, v.get());
    }
    decay.begin_gradient(dstate_across.get(), state + K * V_, V_);
    for (int64_t i = count - 1; i >= 0; --i) {
      const float* const key = k.get() + i * K;
      float* const of_k = to.k + at_q + i * of_keys;
      if (corrects) {
        to.beta[(at + i) * s.H + h] =
            dot_rows(key, x.get() + i * K, K) + dot_rows(v.get() + i * V_, dr.get() + i * V_, V_);
        scale_rows(x.get() + i * K, 1, K, beta + i);
        for (int64_t c = 0; c < s.K; ++c) of_k[c] += x[i * K + c];
      }
      decay.gradient(q.get() + i * K, dq.get() + i * K, key, corrects ? x.get() + i * K : nullptr, y.get() + i * K, s.K,
                     to.g + at_g + i * s.H * of_g);
      for (int64_t c = 0; c < s.K; ++c) of_k[c] += y[i * K + c], to.q[at_q + i * of_keys + c] += dq[i * K + c];
    }

    enter(decay, q.get(), scales, rows, q.get());
    if (corrects) enter(decay, k.get(), minus_beta, rows, k.get());
    product(
        K, V_,
        [&](int64_t r, int64_t c, Sums& sums) INLINE {
          add(q.get(), 1, K, dy.get(), V_, r, c, 0, rows, sums);
          if (corrects) add(k.get(), 1, K, dr.get(), V_, r, c, 0, rows, sums);
        },
        [&](int64_t r, int64_t c, Sums& sums)
            INLINE { put_decayed_rows(dstate.get(), V_, r, c, decay.passed.get(), sums); });
  }
};

template <class Decay>
void all_forward(const Operands& x, const Shape& s, float* out, float* written, float* behind, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const WithoutSubnormals flushed;
    Forward<Decay> forward(s);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < s.M * s.H; ++i) forward.head(x, i / s.H, i % s.H, out, written, behind);
  }
}

// gradients of q and k: `parts` times, one for each part of the heads that share one
template <class Decay>
void all_backward(const Operands& x, const Shape& s, const float* written, const float* grad, const float* grad_behind,
                  const Gradients& first, int64_t parts, int threads) {
  const int64_t share = (s.shared + parts - 1) / parts, of_part = s.B * s.T * s.key_heads() * s.K;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const WithoutSubnormals flushed;
    Backward<Decay> backward(s);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < s.M * s.key_heads() * parts; ++i) {
      const int64_t part = i % parts, head = i / parts % s.key_heads() * s.shared, document = i / parts / s.key_heads();
      Gradients to = first;
      to.q += part * of_part, to.k += part * of_part;
      for (int64_t h = part * share; h < std::min((part + 1) * share, s.shared); ++h)
        backward.head(x, written, grad, grad_behind, document, head + h, to);
    }
  }
}

}  // namespace te_models
using namespace te_models;

// pointers: q, k, v, g, beta or null, initial states or null, starts or null, ends or null, and then out, u or null and
// the states behind; sizes: see `Shape`
extern "C" void te_recurrent_forward(void* const* pointers, const int64_t* sizes, float scale, int threads) {
  const auto at = [&](int i) { return static_cast<float*>(pointers[i]); };
  const Shape s(pointers[6], pointers[7], sizes, scale);
  const Operands x{at(0), at(1), at(2), at(3), at(4), at(5)};
  (s.by_channel ? all_forward<ChannelDecay> : all_forward<HeadDecay>)(x, s, at(8), at(9), at(10), threads);
}

// pointers: as before, then u, the gradients of out and of the states behind, and the gradients to find, as
// `Gradients`, of q and k `parts` times, one for each part of the heads that share one
extern "C" void te_recurrent_backward(void* const* pointers, const int64_t* sizes, float scale, int64_t parts,
                                      int threads) {
  const auto at = [&](int i) { return static_cast<float*>(pointers[i]); };
  const Shape s(pointers[6], pointers[7], sizes, scale);
  const Operands x{at(0), at(1), at(2), at(3), at(4), at(5)};
  const Gradients to{at(11), at(12), at(13), at(14), at(15), at(16)};
  (s.by_channel ? all_backward<ChannelDecay> : all_backward<HeadDecay>)(x, s, at(8), at(9), at(10), to, parts, threads);
}
