# Configures, builds and runs the cross build. The cases are those that end within seconds under
# emulation, for the NEON kernels and the ones that run everywhere.
execute_process(
  COMMAND
    ${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE} -B ${WORK} -D CMAKE_BUILD_TYPE=Release
    -D CMAKE_TOOLCHAIN_FILE=${SOURCE}/cmake/aarch64-linux-gnu.cmake -D FLASHMLA_BUILD_TESTS=ON
    -D FLASHMLA_CUDA=OFF -D FLASHMLA_INSTALL=OFF
  COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
execute_process(COMMAND ${CMAKE_COMMAND} --build ${WORK} --parallel 2 COMMAND_ERROR_IS_FATAL ANY
                OUTPUT_VARIABLE output)
set(cases
    "Decode.TailOfPageIsNeverRead"
    "Decode.QueriesBeyondTheLengthSeeNothing"
    "Decode.TableWiderThanTheCacheAndPadded"
    "Decode.SeveralQueryTokens"
    "Decode.EveryPairOfHeadDimensions"
    "Decode.LogitsOfTenThousandDoNotOverflow"
    "Decode.LargestInputsGiveFiniteResults"
    "Decode.MeanOfTheLargestValues"
    "Decode.NanStaysWithTheQueriesThatSeeIt"
    "Decode.VisibleLensOfRaggedQueries"
    "Decode.FollowsPlansByHand"
    "Decode.RandomCallsWithRandomPlans")
set(ENV{FLASHMLA_TEST_ROUNDS} 4)
unset(ENV{FLASHMLA_ISA}) # what caps this machine's processor is none of the emulated one's
list(JOIN cases "/cpu_neon*:Kernels/" filter)
execute_process(
  COMMAND
    qemu-aarch64 -L /usr/aarch64-linux-gnu ${WORK}/tests/flashmla_api_tests
    --gtest_filter=Kernels/${filter}/cpu_neon*:Abi.KernelsAreListedByName:CppApi.Decodes*
  COMMAND_ERROR_IS_FATAL ANY OUTPUT_VARIABLE output)
message("${output}")
# A filter that matches nothing passes too.
if(NOT output MATCHES "Decode.RandomCallsWithRandomPlans/cpu_neon_bf16 \\(")
  message(FATAL_ERROR "the cases of the NEON kernels did not run")
endif()
execute_process(COMMAND qemu-aarch64 -L /usr/aarch64-linux-gnu ${WORK}/tests/flashmla_unit_tests
                COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
