# SPDX-License-Identifier: Apache-2.0
"""Faults in the kernels for the processor. Those in one instruction set show on machines that have it."""

from mutations.change import In

STREAMS, ROWS = "tests/ops/test_stream_kernels.py", "tests/ops/test_kernels.py"
ROUNDING = f"{STREAMS} {ROWS} -k 'compiled and (test_stream or 16_bit or nan_of or rounded)'"
PRODUCTS = f"{ROWS} -k 'compiled and not million and not 16_bit'"
PUC = f"{STREAMS} tests/ops/test_puc_kernels.py -k compiled"

half = In("csrc/cpu/simd/half.h", ROUNDING)
avx512 = In("csrc/cpu/simd/avx512.h", ROUNDING)
combine = In("csrc/cpu/kernels/layer_combine_kernel.h", f"{STREAMS} {ROWS} -k 'compiled and not million'")
products = In("csrc/cpu/kernels/products_kernel.h", PRODUCTS)
panel = In("csrc/cpu/kernels/products_panel_kernel.h", PRODUCTS)
passing = In("csrc/cpu/kernels/products_passing_kernel.h", PRODUCTS)
pieces = In("csrc/cpu/pieces.h", f"{ROWS} tests/ops/test_slices.py -k compiled")
large = In("csrc/cpu/large_outputs.h", f"{STREAMS} -k compiled")
means = In("csrc/cpu/kernels/puc_combine_kernel.h", PUC)
track = In("csrc/cpu/kernels/puc_track_kernel.h", PUC)
trimmed = In("csrc/cpu/kernels/trimmed_mean_kernel.h", "tests/ops/test_trimmed_mean.py -k compiled")
descend = In("csrc/cpu/common_descent.cpp", "tests/ops/test_common_descent_kernel.py -k compiled")

TO_BFLOAT16 = "write_bits(p, _mm256_cvtepi32_epi16(_mm256_mask_set1_epi32(rounded, nan, 0x7fc0)), stream)"
TO_HALF = (
    "write_bits(p, _mm256_cvtps_ph(_mm512_cvtpd_ps(with_14_bits(x)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),\n"
    "             stream)"
)

MUTATIONS = [
    avx512("streamed float64 numbers are not written", "«stream ? _mm512_stream_pd(p, x) :→if (!stream)» "),
    avx512("streamed float32 numbers are not written", "«stream ? _mm256_stream_ps(p, y) :→if (!stream)» "),
    avx512("streamed bfloat16 numbers are not written", f"«→if (!stream) »{TO_BFLOAT16}"),
    avx512("streamed float16 numbers are not written", f"«→if (!stream) »{TO_HALF}"),
    avx512("NaN becomes a bfloat16 number, by vectors", "«_mm256_mask_set1_epi32(rounded, nan, 0x7fc0)→rounded»"),
    avx512(
        "ties go up to bfloat16, by vectors",
        "«_mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1))→_mm256_set1_epi32(1)»",
    ),
    half("NaN becomes a bfloat16 number", "«(bits & 0x7fffffffu) > 0x7f800000u→false»"),
    half(
        "NaN of low payload becomes infinity in bfloat16",
        "> «0x7f800000u→0x7f80ffffu»;",
        unseen="a conversion from float64 has made the NaN quiet, which sets a bit above",
    ),
    half(
        "bfloat16 is rounded twice",
        "BFloat16* out) {\n  const std::uint32_t bits = bits_of(static_cast<float>(«with_14_bits(x)→x»));",
    ),
    half("ties go up to bfloat16", "«(bits >> 16 & 1u)→1u») >> 16"),
    half("ties go up to float16", "«(rest >> 13 & 1u)→1u»"),
    half("float16 overflows a step early", ">= «0x477ff000u→0x477fe000u»"),
    half("NaN becomes infinity in float16", "if (rest > «0x7f800000u→0x7fffffffu»)"),
    combine("streams begin at 32 bytes", "% «64→32» != 0; ++begin"),
    combine(
        "the last columns are not written", "«for (; begin < end; ++begin) combine_one(terms, begin, out, p.add);→»"
    ),
    combine("sums of the first rows are lost", "«r == 0→true», r + rows"),
    combine("the start is added in the vectors alone", "narrow(«add ? total + widened(out[column]) : →»total"),
    products(
        "norms of the wrong row of 16-bit matrices",
        "const std::int64_t size = «size_of(rows.dtype)→rows.dtype == DType::f64 ? 8 : 4»;",
    ),
    products("a zero row ends the check of the range", "if (square == 0) «break→return true»;"),
    products("overflow passes", "«if (!(size <= 1.7976931348623157e308)) return false;→»"),
    products("sums are not set to zero", "«for (std::int64_t i = 0; i < places; ++i) sums[i] = 0;→»"),
    panel("a panel is not filled up with zeros", "«for (std::int64_t i = width; i < padded; ++i) to[i] = 0;→»"),
    passing(
        "strips are not filled up with zeros",
        "«i + lane < width ? static_cast<T>(widened(from[i + lane])) : 0→"
        "static_cast<T>(widened(from[i + lane < width ? i + lane : i]))»",
    ),
    passing(
        "results of swapped sides are transposed", "«swapped ? moved * others + still : still→still» * others + moved"
    ),
    pieces("an empty layer keeps what was there", "«std::fill(out, out + size_, 0.0);→»"),
    pieces("a part is added to the wrong one", "«std::max(first, right - half)→first»"),
    large("nothing is large", ">= «→1024 * »kStreamBytes", unseen="the same numbers are written, more slowly"),
    means(
        "streams begin at 32 bytes",
        "% «64→32» == 0",
        unseen="outputs of this op begin at 64 bytes, and so do its tasks",
    ),
    means("sums of the first rows are lost", "if («r0 == 0→true») {"),
    means(
        "the last columns are not written", "«for (std::int64_t c = whole; c < end; ++c) mean_one<T>(p, words, c);→»"
    ),
    track(
        "a threshold of 255 keeps nothing",
        "p.low >«→=» most ? 0u",
        unseen="counts in one byte end at 254, as participations do",
    ),
    track("a negative bound keeps zeros", "«p.high < least ? 0u : →»~0u"),
    track("words of a layer's edge are not begun anew", "«if (bit == 0) p.keep[column / 32] = 0;→»"),
    trimmed("of a number and NaN one is lost", "store(high + lane, «a < b ? b : a→b < a ? a : b»)"),
    trimmed("the last lanes stay unsorted", "lane < kTrimLanes«→ - width»; lane += width"),
    descend("the upper median", "(last - room« - 1→») / 2"),
    descend("lengths of 0 count for the median", "return x «!→>»= 0.0; });\n  if (last"),
    descend("the mean length is over all rows", "mean /= «static_cast<double>(count)→descent.online»"),
    descend("the fair row is not made as long", "«mean / length→1.0» : 0.0;"),
    descend("a short fair row is stretched", "length > «least * mean→0.0» ?"),
    descend(
        "the matrix stays as asymmetric as it is",
        "«(0.5 * gram[i * k + j] + 0.5 * gram[j * k + i])→gram[i * k + j]»",
        unseen="the search for the nearest point takes the symmetric part again",
    ),
    descend("the fair row's share is lost", "«with_fair_row && i < k→false»; ++i) coeff[i] +="),
    descend("overflow goes unseen", "«if (std::isnan(gap)) std::fill_n(scale, k, gap);→»"),
    descend("the mean square is the sum", "* squares« / static_cast<double>(live)→»"),
    descend("rounding of the row alone", "descent.rounding * norm[i]« * size→»"),
    descend("remembered rows must be there, too", "scale + «descent.online→k», 0.0)"),
    descend(
        "weights that are not finite count",
        "«descent.weights == nullptr || finite(descent.weights, descent.online)→true»",
    ),
    descend("factors that are not finite count", "«(given != nullptr && !finite(given, k))→false»"),
]
