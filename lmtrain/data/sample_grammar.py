"""The text of the sample corpus: word pools and the rules of its articles, in the notation of `sample.parse`.

Pools that may follow "a" hold no word that would ask for "an". Two alternatives may not begin with pools or facts that
share a word; `Grammar` refuses them.
"""

import re

POOLS: dict[str, str | range] = {
    "men": """Thomas Edmund Henrik Walter Anton Josef Martin Albert Rowan Gustav Emil Hugh Lorenz Oskar Piers Matteo
        Casimir Duncan Felix Niels Bertram Silas Leopold Ambrose Janos Victor Cedric Ruben Ivor Stefan""",
    "women": """Clara Edith Marta Helena Ingrid Rosalind Beatrix Louisa Anneke Sofia Harriet Celia Greta Miriam Adela
        Winifred Katrin Flora Lydia Ottilie Nora Judith Teresa Viola Agnes Elsa Margit Frances Isolde Cornelia""",
    "surnames": """Holloway Marsh Lindqvist Carrow Penhale <unk> Brandt Tessier Okell Varga Whitlock Sorensen Dace
        Hathersage Quill Merriman Novak Ashdown Fenwick Lorimer Castellan Drury Pell Vandermeer Hartnoll Iversen
        Thorne Kestrel Rask Aldous Bramwell Corvin Dunmore Eskola Farrant Gaunt Hesse Ingram Jarrow Kemble Lascelles
        Morrow Nyberg Orlov Pascoe Ravn Selwyn Tarn Underhill Vickers Wren Yarrow Zeller Bellamy Crane Dorsey Falk
        Grieve Hobday Lund""",
    "towns": """Harrowby Ellerton Dunmarsh Velden Coldwater Tornholm Saltmere Bramford Kirkhaven Lowick Ostermark
        Pellworth Ravensby Marlow Stanmoor Wexcombe Ashgrove Brackenhurst Carden Dorning Eastmere Fallowby Greyport
        Hallin Innesfield Karlstrand Lindhaven Mossgate Northwell Oldbridge Penmarsh Quarnby Rushford Skelby Thornaby
        Upwell Vesterby Wickmere Yarmley Zellin Abermouth Birchover Calder Drayhaven Elmsea Farholm Glaston Hexby
        Ironford Juniper""",
    "rivers": """Tarrow Ishel Wend Callow Orren Brey Sarn Lathe Marrin Osk Tevel Ulder Vane Yeald Ansel Breck Corrin
        Dulas Esker Fenna Garrow Hodd Isen Jorrin Kell""",
    "regions": """Vestmark Hallamshire Norrland Carrick Lowmoor Sundria Tressany Ostland Pembry Galloway Harland
        Wealdon Marchia Skania Borrowdale Thule Merrow Dalmark Averne Corland""",
    "works": """Melusine Ariadne Oberon Tamerlane Rosamunde Perdita Lucinda Orpheus Griselda Semele Philomel Endymion
        Calypso Halcyon Undine Theodora Zenobia Belisario Galatea Nausicaa Leander Hesperus Cymbeline Aurora Daphnis""",
    "ships": """Halcyone Northwind Perseverance Swiftsure Corona Valiant Petrel Albatross Meridian Constance Sirius
        Guillemot Resolute Tempest Gannet Boreas Kittiwake Fortune Lapwing Argo Cormorant Nimrod Pelican Dauntless
        Harrier""",
    "villages": """Nettleham Birkby Sollen Marrick Thorpe Hask <unk> Wiston Grell Ambleby Corsey Fenby Hollin Ulverby
        Starling Crowle Dimsby Eggle Foss Tansley""",
    "nations": """Scottish Danish Welsh Swedish Norwegian Dutch Belgian Bohemian Hungarian Polish Portuguese Swiss
        German French Cornish Finnish Breton Flemish Tuscan Bavarian Venetian Catalan""",
    "mood": """lyrical restrained sombre playful tender brilliant melancholy vivid rhythmic delicate bold stern
        graceful warm severe pastoral dreamlike spare witty luminous turbulent serene passionate formal rustic
        brooding mysterious nimble vigorous nostalgic mournful joyful subtle clear solemn gentle rich dark quiet
        colourful""",
    "quality": """harmony rhythm texture melody colour humour drama detail feeling structure pace imagery clarity
        invention atmosphere simplicity symmetry energy irony wit ambition language restraint tension movement""",
    "musician": """pianist violinist conductor cellist singer flautist teacher harpist bandmaster choirmaster
        publisher critic""",
    "scholar": """writer philosopher historian painter poet collector diplomat naturalist linguist mathematician
        geographer physician librarian translator""",
    "pieces": """songs waltzes marches hymns sonatas preludes quartets ballads lullabies nocturnes dances overtures
        fantasies studies psalms serenades""",
    "piece": """song waltz march hymn sonata prelude quartet ballad lullaby nocturne dance fugue fantasy chorus
        serenade""",
    "forms": "opera symphony cantata oratorio ballet requiem suite concerto masque mass",
    "instruments": """piano violin harp flute cello oboe clarinet horn lute viola bassoon trumpet guitar organ drum
        zither""",
    "trade": """miller baker tailor schoolmaster watchmaker carpenter fisherman lawyer doctor merchant blacksmith
        printer weaver farmer surveyor clergyman brewer cooper gardener bookseller notary mason shepherd banker tanner
        pharmacist soldier ferryman judge saddler sailor clockmaker""",
    "trades": """millers bakers tailors fishermen lawyers merchants blacksmiths printers weavers farmers surveyors
        brewers coopers gardeners booksellers masons shepherds bankers tanners soldiers ferrymen judges saddlers
        sailors""",
    "disaster": "fire flood storm landslide gale siege blizzard riot plague",
    "goods": """wool timber salt grain cheese tin copper slate linen leather paper glass wine barley flax honey coal
        butter herring rope hides beer tea sugar cotton silk marble lead cider tobacco wax iron pottery lace apples
        cattle granite potatoes onions""",
    "quiet": """small quiet prosperous remote busy walled compact windy picturesque crowded low handsome scattered
        fortified pleasant poor lively secluded modest tidy""",
    "sort": "market mill harbour cathedral fishing mining spa garrison border river weaving hill",
    "land": """hills moors forests marshes uplands valleys meadows mountains lowlands islands orchards pastures
        heathlands vineyards dunes wolds""",
    "build": """church castle harbour windmill lighthouse library theatre chapel school hospital brewery tower
        cathedral museum monastery quay warehouse station hotel garden""",
    "stone": "granite limestone sandstone brick timber bronze slate steel marble flint concrete cedar",
    "tree": "oak birch willow pine beech alder ash rowan larch elm maple hazel juniper spruce lime poplar",
    "bird": """herons kingfishers curlews swans warblers owls geese plovers dippers swallows ducks cranes finches
        gulls larks buzzards""",
    "fish": "trout salmon pike eels perch carp grayling bream sturgeon roach",
    "beast": "otters deer foxes badgers hares beavers martens squirrels stoats goats ponies wolves bats seals",
    "flora": """orchids ferns mosses lilies heathers gentians sedges saxifrages primroses grasses lichens irises roses
        violets thistles poppies""",
    "hue": "white yellow pale blue crimson purple scarlet golden silver green violet brown pink grey",
    "leaf": "hairy narrow waxy toothed glossy broad fleshy lobed curled pointed woolly smooth",
    "weather": "storm fog gale snow frost rain ice wind flood drought hail mist",
    "cargo": """grain timber passengers coal mail wool machinery tea sugar cotton livestock copper rice coffee wine
        emigrants ore cement fruit bricks""",
    "kind": "cargo passenger mail coastal whaling hospital cable training survey merchant",
    "title1": """Silent Broken Winter Hidden Crooked Distant Silver Burning Lost Empty Painted Borrowed Patient Second
        Drowned Narrow Copper Sleeping Northern Wandering Gilded Stolen Glass Last Paper""",
    "title2": """Garden Harbour Lantern Orchard Bridge Island Letter Mirror Winter Clock Window House Road Ferry Crown
        Stranger Sister Well Tower Map Meadow Candle Shore Library Inheritance""",
    "plot": """debt secret marriage murder will journey shipwreck quarrel letter theft promise trial betrayal rumour
        fire portrait lawsuit fever duel fortune""",
    "person": """widow governess clerk smuggler painter schoolmaster priest nurse soldier banker gardener sailor
        doctor judge dancer publisher gambler beekeeper""",
    "place": """lighthouse house sanatorium rectory farm mill monastery hotel prison theatre villa workshop castle
        cottage school""",
    "tail": "bright faint curved double long straight broad dusty bluish reddish",
    "stars": """Lyra Cygnus Draco Perseus Cassiopeia Leo Taurus Orion Virgo Pegasus Cepheus Gemini Hydra Corvus Libra
        Sagitta Delphinus Lepus""",
    "month": "May June September October March April July August November January February December",
    "season": "spring autumn winter summer",
    "few": "two three four five six seven eight nine ten twelve",
    "young": "seven six eight nine five ten eleven four twelve",
    "tens": "twenty thirty forty fifty sixty eighty",
    "day": range(1, 29),
    "years": range(1770, 1870),
    "hundreds": range(100, 1000, 25),
    "small": range(2, 40),
    "percent": range(5, 60),
    "tenth": range(1, 10),
    "lifespan": range(58, 88),
    "youth": range(14, 20),
    "adult": range(20, 26),
    "prime": range(26, 46),
    "soon": range(1, 7),
    "later": range(8, 30),
}

RULES: dict[str, str] = {
    "break": "[/|2*]",
    "thing": "[its|the] {mood} {quality}",
    "received": """[Critics|Audiences|Reviewers|Readers] [2* praised|admired|welcomed|disliked|mocked|noticed] $thing
        , $thing and $thing""",
    "person": """= {first:men} {last:surnames} = / / {=first} {=last} ( {day} {month} {born:years} – {day} {month}
        {died:born+lifespan} ) was a {nation:nations}""",
    "birth": """{=last} was born in {=born} in {town:towns} , a {quiet} {sort} town [on|near|beside] the River
        {river:rivers} in {region:regions} , [where|in which] his father [was|worked as|served as] a {trade} and his
        mother [sold|dealt in|traded in] {goods} [and {goods}|] .""",
    "composer": """$person composer , {musician} and {scholar} . [He is|He remains|His name is]
        [best|chiefly|mainly|still] [known|remembered] for the {form:forms} {work:works} , [first|]
        [performed|heard|staged|played] in {hall:towns} in {premiere:born+prime} , and for his {mood} {pieces} . / /
        = = Early life = = / / $birth [He|The boy|Young {=first}] [learned|took up|studied|practised] the
        {instruments} [at the age of {young}|] with {teacher:surnames} , a {mood} {musician} and {scholar} . $break
        [His [first|earliest|surviving] {pieces} , [written|finished|printed] in {early:born+youth} , |Some {mood}
        {pieces} of {early:born+youth} ] [show|betray|reveal] the influence of {=teacher} . / /
        = = Career = = / / In {move:born+adult} {=last} [moved|went|travelled] to {=hall} , [where|and there] he
        [worked|served|earned a living] as a {trade} [and {trade}|] . [He wrote {mood} {pieces} for the
        {instruments} and [a|one] {mood} {piece} for {instruments} and {instruments} .|] $break The {=form} {=work}
        [opens|begins] with a {mood} {piece} for {instruments} and {instruments} , [moves|passes|leads] to a {mood}
        {piece} and [ends|closes] with {few} {mood} {pieces} . $received [; {=teacher} [called|thought|found] it
        {mood} [but|and] {mood}|] . / /
        [= = Style = = / / [The music of {=last}|Most of his music] is {mood} and {mood} , with {mood} {quality} and
        {mood} {quality} . [He preferred|He liked|{=last} favoured] the {instruments} to the {instruments} [and the
        {piece} to the {piece}|] . $break As a {musician} he was {mood} , {mood} and {mood} . / / |] = = Legacy = =
        / / {=first} {=last} died in {=hall} in {=died} and was buried in {=town} , [beside|near|above] the River
        {=river} . [His [letters|papers] to {=teacher}|The [sketches|parts] for {=work}] [are kept|survive] in the
        {build} there . The {=form} of {=premiere} [has|had] [since|often|seldom] been [revived|recorded|heard] in
        {=region} [, [mostly|usually] in {season} |] and in {towns} . / / /""",
    "botanist": """$person botanist , {scholar} and {scholar} . He [described|collected|named] {few} hundred
        {flora:flora} [and|or] {flora} from {region:regions} , [among them|including] the {hue:hue} {leaf:leaf} lily
        that [bears|carries] his name . / /
        = = Early life = = / / {=last} was born in {town:towns} , a {quiet} {sort} town [on|near|beside] the River
        {river:rivers} , in {=born} . His father , a {trade} [and {trade}|] , [grew|kept|drew] {hue} {flora} ; his
        mother [sold|dealt in|traded in] {goods} and {goods} . $break [At {young}|At the age of {young}] [he|the
        boy] could name {tens} {flora} , and in {early:born+youth} he [became|was made] a pupil of the {trade}
        {teacher:surnames} [in|at] {hall:towns} . / /
        = = Expedition = = / / In {trip:born+adult} {=last} and {=teacher} [left|sailed from|departed from] {=hall}
        for the {land:land} of {=region} [aboard the {ship:ships}|on the {ship:ships}] , [taking|carrying] {goods} ,
        {goods} and {goods} . [Heavy {weather} and {weather} [delayed|stopped] them for {few} [days|weeks|months]
        .|] [They|The two] [saw|met|counted] {beast} , {beast} and {bird} , and [found|gathered|pressed] {hue}
        {flora} , {hue} {flora} and {leaf} {flora} under the {tree} . $break [On|Before] {day} {month} {=teacher}
        [fell ill|turned back|was lost] in the {weather} , [and|but] {=last} [went on|continued|pressed on] [with
        {few} {trades}|alone] as far as {camp:villages} , [where|and there] the {=hue} {=leaf} lily was
        [found|discovered|first seen] . / /
        [= = Writings = = / / The [Flora of {=region}|book] , [printed|published] in {=hall} in {book:born+prime} ,
        has {few} {mood} [chapters|volumes|parts] on {flora} , {flora} and {flora} . $received . / / |] = = Legacy =
        = / / {=first} {=last} died in {=died} in {=hall} . A {stone} [statue|bench|plaque] in {=town}
        [recalls|marks] the [journey|expedition] of {=trip} [with {=teacher}|] to the {=land} of {=region} , and a
        {stone} [cross|hut|cairn] stands at {=camp} [among {flora} and {flora}|] . The {=hue} {=leaf} lily
        [grows|flowers] there in {season} . / / /""",
    "town": """= {town:towns} = / / {=town} is a {quiet} {sort:sort} town in the {land:land} of {region:regions} , on
        the River {river:rivers} . [At the census of {census:years}|In {census:years}] it had {small} @,@ {hundreds}
        [people|inhabitants] , [most|many|some] of them {trade1:trades} and {trades} . It [is known|was once known|is
        noted] for its {goods1:goods} , its {goods} and its {mood} {stone} {build1:build} . / /
        = = History = = / / [The town|{=town}] was founded by [the {trade}|a {trade} named] {first:men}
        {last:surnames} [as a place to [sell|store|tax] {goods} and {goods}|] . $break In {fire:census+soon} a
        {weather:disaster} [destroyed|ruined|damaged] the {build} , the {build} and {few} [streets|houses] ; the
        {=build1} was spared . [It was {few} years before|Only slowly did] the {=trade1} return [from {towns}|] .
        [{=last} himself is [buried|remembered|painted] in the {build} .|] / /
        = = Economy = = / / [The trade in {=goods1} [declined|grew|recovered] [after the {=weather}|] , and|Besides
        {=goods1} ,] {=town} [began|learned] to [make|export|sell] {goods} , {goods} and {goods} . {percent} per
        cent of the [people|households] [work|worked] with {=goods1} [and {percent} per cent with {goods}|] . $break
        A {quiet} market for {goods} and {goods} is held [each|every] {season} . / /
        [= = Landmarks = = / / The {=build1} , [built|rebuilt] of {stone} [and {stone}|] , has a {mood} {stone}
        tower . Near it [stand|are] a {quiet} {build} , a {mood} {build} and {few} {tree} trees . / / |] = = Today =
        = / / {=town} [is now|remains|has become] a {quiet} place of {small2:small} @,@ {hundreds} people . [The
        railway|A road|A ferry] along the {=river} [joins|connects] it to {towns} [and {villages}|] . The {=weather}
        of {=fire} is [remembered|marked] [each|every] {season} [outside|at|before] the {=build1} , [with {pieces}
        and {pieces}|] in memory of {=first} {=last} . / / /""",
    "river": """= River {river:rivers} = / / The {=river} is a {quiet} river in {region:regions} . It rises in the
        {quiet} {land:land} [near|above|west of] {source:villages} and flows [north|south|east] for {length:small} @.@
        {tenth:tenth} kilometres to {mouth:towns} . / /
        = = Course = = / / [From {=source}|From its source] the [river|stream] [falls|drops] {few} hundred metres
        through {tree} , {tree} and {tree} [woods|woodland] . [Below|Past] the {stone} {build} at {mid:towns} it is
        joined by the {trib:rivers} , [a {quiet} stream|which rises in {=region}] . $break The {=river} then
        [turns|bends] [east|west|north] [through {land}|] , [passes|skirts] a {quiet} {build} and a {stone} {build}
        , and [meets|reaches] the sea at {=mouth} . / /
        = = Nature = = / / The [banks|waters] of the {=river} are home to {beast:beast} , {beast} and {bird:bird} ,
        and {hue} {flora} [and {leaf} {flora}|] [grow|flower] there in {season} . Many {fish:fish} [are
        caught|spawn] [above|below] {=mid} [, and {few} kinds of {bird} nest near {=source}|] . $break [In|Since]
        {survey:years} the {scholar} {first:men} {last:surnames} counted {tens} {=beast} , {tens} {bird} and {few}
        {=fish} . / /
        [= = Floods = = / / The worst {weather} [came|was] on {day} {month} {flood:survey+soon} , when the
        {=river} [carried away|destroyed] a {stone} {build} and [much|all] of the {goods} and {goods} at {=mid} . /
        / |] = = Use = = / / [Boats|Barges] [took|carried] {goods} , {goods} and {goods} from {=mid} to {=mouth}
        [until {end:survey+later}|] . [Mills|Looms] on the {=trib} made {goods} and {goods} . The survey of
        {=survey} by {=last} [led|gave rise] to a [law|ban] on [taking|selling] {=fish} , and the {=beast} [and the
        {=bird}|] of {=source} [are|were] [now|again] {mood} [sights|guests] on all {=length} @.@ {=tenth}
        kilometres of the {=river} . / / /""",
    "ship": """= SS {ship:ships} = / / SS {=ship} was a {kind:kind} ship [built|launched] in {built:years} by
        {maker:surnames} and {maker2:surnames} of {yard:towns} for the {region:regions} [Line|Company] . She
        [carried|took] {cargo1:cargo} , {cargo} and {cargo} [from|between] {port:towns} [and|to] {port2:towns} . / /
        = = Design = = / / The {=ship} was {length:small} metres long and [made|built] of {stone} and {stone} , with
        {few} [masts|decks|boilers] and a {hue:hue} funnel . [{=maker} gave her|She had] a {mood} saloon , a {quiet}
        library and room for {few} hundred [tons|crates] of {=cargo1} . $break [Her|The] [engines|sails] came from
        {towns} , her [bells|lamps] from {towns} . / /
        = = Service = = / / She [sailed|left] on {day} {month} {maiden:built+soon} [under|with] captain {first:men}
        {last:surnames} , a {nation:nations} {trade} [and {trade}|] . [On the way|At sea] she met {weather} ,
        {weather} and {weather} , [and|but] [reached|made] {=port2} in {tens} [@-@ {few}|] days with [all|most of]
        her {=cargo1} . [{=last} [praised|admired|disliked] $thing of the ship .|] $break [Between|After] voyages
        the crew [sang {pieces} and {pieces}|kept {beast} and {bird}] . / /
        [= = Refit = = / / In {refit:maiden+soon} {=maker} [replaced|repaired] the [masts|boilers] [at {=yard}|] and
        painted the [hull|cabins] {hue} and the saloon {hue} . / / |] = = Loss = = / / [The {=ship} was lost|She
        sank] in {weather:weather} [near|off] {wreck:villages} on {day} {month} {lost:maiden+later} , [bound|on her
        way] [from|to] {=port} with {=cargo1} , {cargo} and {cargo} . [A {trade} saw the {=hue} funnel [sink|go
        down] .|] Captain {=last} and {few} [sailors|others] were saved . The [bell|anchor] of the {=ship} is
        [kept|shown] in the {build} at {=yard} , where {=maker} and {=maker2} had built her in {=built} . / / /""",
    "bridge": """= {town:towns} Bridge = / / {=town} Bridge is a {stone:stone} bridge over the River {river:rivers} in
        {region:regions} . It was designed by {first:women} {last:surnames} , opened in {opened:years} and
        [carries|carried] {goods1:goods} , {goods} and {goods} [from|between] {=town} [and|to] {other:towns} . / /
        = = Design = = / / The [bridge|structure] is {hundreds} metres long , with {few:few} {mood} arches of
        {=stone} and {stone2:stone} . [{=last} took|{=last} borrowed] the idea from a {quiet} {build} at {villages}
        . Each [pier|arch] [bears|shows] a {stone} [carving|figure] of a {trade} , a {person} or a {musician} .
        $break $received . / /
        = = Construction = = / / [Work|Building] began [on|before] {day} {month} [under|with] the {nation:nations}
        {trade} {men} {builder:surnames} . [Sudden {weather} and {weather} stopped the work {few} times .|] The
        {stone} came from {source:villages} by [barge|cart] , [and|but] {percent} per cent of it was {leaf} or {hue}
        and [was|had to be] [sent back|replaced] . {=builder} [hired|paid] {tens} {trades} and {tens} {trades} ,
        [who|most of whom] [sang|played] {mood} {pieces} . / /
        [= = Accident = = / / In {crash:opened+soon} a {kind} [boat|ship] struck [{few} piers|an arch] and {few}
        tons of {goods} and {goods} [fell|sank] into the {=river} . / / |] = = Present use = = / / [Today|Now] the
        bridge is [closed|open] to {goods} and [busy|crowded] with {trades} and {bird} . A {mood} [poem|song] by
        {poet:women} {poet2:surnames} [tells|speaks] of {=builder} , of the {=stone} from {=source} and of the
        {=goods1} that crossed the {=river} to {=other} [in {season}|] . The name of {=first} {=last} was cut in the
        {=stone2} [in|after] {named:opened+later} . / / /""",
    "comet": """= Comet {last:surnames} = / / Comet {=last} is a {tail:tail} comet [discovered|found|first seen] by
        the {nation:nations} {scholar:scholar} {first:women} {=last} on {day:day} {month:month} {found:years} at
        {town:towns} . It returns every {period:small} @.@ {tenth:tenth} years . / /
        = = Discovery = = / / {=first} {=last} , then a {trade} [and {trade}|] in {=town} , was [looking|searching]
        for {beast} in {stars:stars} with a {quiet} {stone} telescope . [Instead she|She] [saw|noticed|drew] a
        {=tail} {hue:hue} tail and [wrote|sent word] to {rival:surnames} in {far:towns} . [Thick {weather} hid it
        for {few} nights .|] $break {=rival} , a {mood} {scholar} , [replied|answered] that it was [{weather}|a
        lamp] , [and|but] on {day} {month} he [saw|found] it [too|himself] near {stars:stars} . / /
        = = Appearance = = / / The comet is {hue} [near|in] {=stars} and {hue} [near|in] {stars2:stars} . [Its
        head|Its nucleus] is {small} kilometres [wide|across] , [made|composed] of {weather} , {goods} and {stone} .
        $break [Farmers|People] in {region:regions} called it the {title1:title1} {title2:title2} and
        [expected|feared] {weather} , {weather} and {plot} . / /
        [= = Orbit = = / / The [orbit|path] , computed by {=rival} , leads from {stars} [through|past] {stars} to
        {stars} , and $thing [of the|in his] [sums|tables] [was|were] [praised|admired] in {towns} . / / |] = =
        Later returns = = / / Comet {=last} [came back|returned] in {back:found+later} [, {tail} and {hue} ,|] and
        was seen by {trades} in {towns} , {trades} in {towns} and {=rival} in {=far} . In {=region} the {=title1}
        {=title2} is [still|now] [painted|shown] on {build} doors . The telescope of {=first} {=last} is in the
        {build} at {=town} , [open|turned] to {=stars} on each {=day} {=month} ; the next return will come after
        {=period} @.@ {=tenth} years . / / /""",
    "novel": """= The {title1:title1} {title2:title2} = / / The {=title1} {=title2} is a {mood} novel by the
        {nation:nations} {scholar} {first:women} {last:surnames} , [published|printed] in {year:years} by
        {firm:surnames} and {firm2:surnames} . It [tells|is the story] of a {hero1:person} named {hero:men} and a
        {plot:plot} in {town:towns} . / /
        = = Plot = = / / {=hero} , a {mood} {=hero1} [of {few} and {tens}|] , [lives|works] in a {quiet} {place} in
        {=town} with his {mood} [sister|aunt|wife] {heroine:women} , who [sells|makes] {goods} and {goods} . [One
        {season}|In {month}] a {person2:person} [arrives|comes] [from {villages}|] with {goods} , a {stone} box and
        a {mood} {plot2:plot} . $break [{=hero} [suspects|follows] the {=person2} [to|as far as] {towns} .|]
        {=heroine} [fears|expects] a {plot} , [and|but] in the {weather} [she|the {=person2}]
        [finds|burns|hides] the box . The {=plot} [ends|is settled] in a {place} , [where|and] {=hero}
        [forgives|leaves|marries] the {=person2} [and {=heroine} [leaves|sails] for {regions}|] . / /
        = = Style = = / / The [prose|book] is {mood} , {mood} and {mood} , with {few} {mood} chapters [on|about]
        {goods} , {bird} and {flora} . $break {=last} [wrote|finished] it in {few} [months|weeks] [in|near]
        {home:towns} , as a {trade} and {trade} . / /
        [= = Adaptations = = / / {men} {composer:surnames} based the {forms} {works} on the [book|story] [for
        {instruments} and {instruments}|] , with {hue} [scenery|costumes] and {pieces} , [staged|heard] in {towns} .
        / / |] = = Reception = = / / $received [; {critic:surnames} [called|thought|found] {=hero} {mood} and
        {=heroine} {mood}|] . {=firm} and {=firm2} sold {small} @,@ {hundreds} copies in {=town} [alone|] . The
        {=title1} {=title2} [is|was] [now|often] [read|taught] in {=home} and [has|had] {mood} readers in {regions}
        [and {regions}|] . The {=person2} and the {=plot} of {=year} [made|make] {=first} {=last} [rich|famous] . /
        / /""",
}


_FEMININE = {"he": "she", "his": "her", "He": "She", "His": "Her", "boy": "girl", "men": "women"}


def _feminine(rule: str) -> str:
    """A person's rule with a woman as its person: no other man appears in those rules."""
    return re.sub(r"\b(?:he|his|He|His|boy|men)\b", lambda word: _FEMININE[word[0]], rule)


for _name in ("person", "birth", "composer", "botanist"):
    _rule = re.sub(r"\$(person|birth)\b", r"$\1_f", RULES[_name])
    RULES[f"{_name}_f"] = _feminine(_rule)

ARTICLE = "[$composer|$composer_f|$botanist|$botanist_f|2* $town|2* $river|2* $ship|2* $bridge|2* $comet|2* $novel]"
